// The state machine of exchanges, and what allgather and alltoall stage, send and copy.
#include "collectives/exchange_pipeline.hpp"

#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "base/fault_points.hpp"

namespace hsgd {

ExchangePipeline::ExchangePipeline(const PipelineContext& context, const NodeMap& map,
                                   uint64_t steps, CopyFn copy, StepMessages* wire)
    : context_(context), map_(map), copy_(copy), wire_(wire), steps_(steps) {
  if (wire_ != nullptr) wire_->start();
}

bool ExchangePipeline::stage_first() { return staged_ > 0 || try_stage(Permission::kUnknown); }

Step ExchangePipeline::step(Permission permission) {
  hsgd_record* record = context_.record;
  bool moved = at_level(record, &hsgd_record::reduce, [&] { return try_stage(permission); });
  if (permission == Permission::kGranted) {
    if (wire_ != nullptr) {
      moved |= at_level(record, &hsgd_record::inter, [&] { return try_exchange(); });
    }
    moved |= at_level(record, &hsgd_record::gather, [&] { return try_collect(); });
  }
  if (collected_ == steps_) return Step::kDone;
  return moved ? Step::kProgress : Step::kIdle;
}

// A slot is free again when all ranks of the node have collected the step that it held before: a
// rank collects only what all leaders have sent and received, so they are done with it, too.
bool ExchangePipeline::try_stage(Permission permission) {
  // One step ahead keeps the ring in cache; between nodes the link is slower than any cache.
  const uint64_t ahead = context_.leaders == 0 ? 2 : context_.slots;
  if (staged_ == steps_ || staged_ >= collected_ + ahead) return false;
  const uint64_t step = context_.base + staged_;
  if (!context_.local.peers_freed(&Progress::gathered, step, context_.slots)) return false;
  *context_.intra_bytes += fill(staged_, in_slot(context_.local.rank(), staged_), permission);
  HSGD_FAULT_POINT("exchange: staged, not told");
  context_.local.publish(&Progress::staged, step + 1);
  HSGD_FAULT_POINT("exchange: staged");
  ++staged_;
  return true;
}

bool ExchangePipeline::try_exchange() {
  bool moved = false;
  while (wire_->begun() < staged_) {  // at most `slots` ahead of what is collected
    const uint64_t step = context_.base + wire_->begun();
    // What is sent must be staged, and what arrives lands where step - slots was: everybody must
    // have collected that.
    if (!context_.local.peers_reached(&Progress::staged, step + 1)) break;
    if (!context_.local.peers_freed(&Progress::gathered, step, context_.slots)) break;
    post(wire_->begun());
    moved = true;
  }
  moved |= wire_->progress();
  for (; exchanged_ < wire_->finished(); ++exchanged_) {
    count_received(exchanged_);
    context_.local.publish(&Progress::exchanged, context_.base + exchanged_ + 1);
  }
  return moved;
}

// Both sides go through the ranks of a node in the same order, because messages between two leaders
// are matched in order.
void ExchangePipeline::post(uint64_t step) {
  wire_->begin();
  const int me = map_.node();
  const int nodes = map_.nodes();
  for (int i = 1; i < nodes; ++i) {
    const int from = (me + nodes - i) % nodes;
    for (int place = map_.first(from); place < map_.end(from); ++place) {
      if (carries(place)) receive(step, place);
    }
  }
  for (int place = map_.first(me); place < map_.end(me); ++place) {
    if (carries(place)) send(step, place, in_slot(place - map_.first(me), step));
  }
  HSGD_FAULT_POINT("between nodes: block sent");
}

void ExchangePipeline::count_received(uint64_t step) {
  for (int place = 0; place < map_.size(); ++place) {
    if (!map_.is_here(place) && carries(place)) {
      wire_->count_received(received_bytes(step, place));
    }
  }
}

bool ExchangePipeline::try_collect() {
  if (collected_ == staged_) return false;
  const uint64_t step = context_.base + collected_;
  if (!context_.local.peers_reached(&Progress::staged, step + 1)) return false;
  for (int leader = 0; leader < context_.leaders; ++leader) {
    const Progress& progress = context_.local.progress(leader);
    if (progress.exchanged.load(std::memory_order_acquire) < step + 1) return false;
  }
  *context_.intra_bytes += collect(collected_);
  HSGD_FAULT_POINT("exchange: collected, not told");
  context_.local.publish(&Progress::gathered, step + 1);
  HSGD_FAULT_POINT("exchange: collected");
  ++collected_;
  return true;
}

// --- allgather ---

AllgatherPipeline::AllgatherPipeline(const PipelineContext& context, const void* in, void* out,
                                     const BlockTable& table, size_t element_bytes, CopyFn copy,
                                     ReduceFn copy_twice, StepMessages* wire)
    : ExchangePipeline(context, table.map(), table.steps(), copy, wire),
      in_(static_cast<const std::byte*>(in)),
      out_(static_cast<std::byte*>(out)),
      table_(table),
      size_(element_bytes),
      copy_twice_(copy_twice) {}

uint64_t AllgatherPipeline::fill(uint64_t step, std::byte* slot, Permission permission) {
  const Range piece = table_.piece(map_.place(), step);
  const void* from = own_input(piece);
  std::byte* to = out_ + piece.begin * size_;
  const size_t bytes = piece.count() * size_;
  if (permission == Permission::kGranted && from != to && bytes > 0) {
    copy_twice_({&from, 1, slot, to, bytes, 1.0, context_.store, context_.out_store});
  } else {
    copy_(slot, from, bytes, context_.store);
    if (permission != Permission::kGranted) ++early_;
  }
  return bytes;
}

void AllgatherPipeline::send(uint64_t step, int place, const std::byte* slot) {
  const Range piece = table_.piece(place, step);
  for (int i = 1; i < map_.nodes(); ++i) {
    const int to = (map_.node() + i) % map_.nodes();
    wire_->send(to, Channel::kExchange, slot, piece.count() * size_);
  }
}

void AllgatherPipeline::receive(uint64_t step, int place) {
  wire_->receive(map_.node_at(place), Channel::kExchange, landed(step, place),
                 table_.piece(place, step).count() * size_);
}

uint64_t AllgatherPipeline::received_bytes(uint64_t step, int place) {
  return table_.piece(place, step).count() * size_;
}

uint64_t AllgatherPipeline::collect(uint64_t step) {
  const int own = map_.place();
  const int first = map_.first(map_.node());
  uint64_t bytes = 0;
  for (int i = 0; i < map_.size(); ++i) {
    const int place = (own + i) % map_.size();  // not all from the same one at once
    const Range piece = table_.piece(place, step);
    const std::byte* from =
        map_.is_here(place) ? in_slot(place - first, step) : landed(step, place);
    if (place == own) {
      if (step >= early_) continue;  // done when it was staged
      from = own_input(piece);
    } else {
      bytes += piece.count() * size_;
    }
    copy_(out_ + piece.begin * size_, from, piece.count() * size_, context_.out_store);
  }
  return bytes;
}

// --- alltoall ---

namespace {

// Offsets at the beginning of slots and blocks.
uint32_t offset_at(const std::byte* header, int index) {
  uint32_t offset = 0;
  std::memcpy(&offset, header + static_cast<size_t>(index) * sizeof offset, sizeof offset);
  return offset;
}

void set_offset(std::byte* header, int index, uint64_t offset) {
  const auto value = static_cast<uint32_t>(offset);
  std::memcpy(header + static_cast<size_t>(index) * sizeof value, &value, sizeof value);
}

size_t offsets_bytes(int count) { return (static_cast<size_t>(count) + 1) * sizeof(uint32_t); }

}  // namespace

AlltoallShape::AlltoallShape(const NodeMap& map, size_t chunk_bytes)
    : map_(map), chunk_bytes_(chunk_bytes), unit_bytes_(kLine) {
  for (int node = 0; node < map.nodes(); ++node) {
    const size_t lost = block_header_bytes(node) + static_cast<size_t>(map.ranks_on(node)) * kLine;
    if (landing_bytes(node) < 2 * lost) unit_bytes_ = sizeof(double);  // the largest element
  }
}

size_t AlltoallShape::slot_header_bytes() const {
  return round_up(offsets_bytes(map_.nodes()), unit_bytes_);
}

size_t AlltoallShape::block_header_bytes(int node) const {
  return round_up(offsets_bytes(map_.ranks_on(node)), unit_bytes_);
}

size_t AlltoallShape::landing_bytes(int node) const {
  const int remote = map_.size() - map_.ranks_on(node);
  return remote == 0 ? chunk_bytes_ : chunk_bytes_ / static_cast<size_t>(remote) / kLine * kLine;
}

size_t AlltoallShape::landing_offset(int place) const {
  const int node = map_.node();
  const int index = place < map_.first(node) ? place : place - map_.ranks_on(node);
  return static_cast<size_t>(index) * landing_bytes(node);
}

uint64_t AlltoallShape::steps_needed(const uint64_t* counts, size_t element_bytes) const {
  uint64_t steps = 1;
  uint64_t total_bytes = 0;
  uint64_t total_lost = slot_header_bytes();
  for (int node = 0; node < map_.nodes(); ++node) {
    uint64_t bytes = 0;
    uint64_t lost = block_header_bytes(node);
    for (int place = map_.first(node); place < map_.end(node); ++place) {
      bytes += place == map_.place() ? 0 : counts[map_.rank(place)] * element_bytes;
      lost += unit_bytes_;
    }
    if (node != map_.node()) steps = std::max(steps, steps_for(bytes, landing_bytes(node), lost));
    total_bytes += bytes;
    total_lost += lost;
  }
  return std::max(steps, steps_for(total_bytes, chunk_bytes_, total_lost));
}

AlltoallPipeline::AlltoallPipeline(const PipelineContext& context, const void* in, void* out,
                                   std::vector<Block> sent, std::vector<Block> received,
                                   uint64_t steps, const AlltoallShape& shape, const NodeMap& map,
                                   size_t element_bytes, CopyFn copy, StepMessages* wire)
    : ExchangePipeline(context, map, steps, copy, wire),
      in_(static_cast<const std::byte*>(in)),
      out_(static_cast<std::byte*>(out)),
      sent_(std::move(sent)),
      received_(std::move(received)),
      shape_(shape),
      size_(element_bytes) {
  for (Block& block : sent_) block.cut(steps, shape.unit_bytes() / size_);
  for (Block& block : received_) block.cut(steps, shape.unit_bytes() / size_);
}

uint64_t AlltoallPipeline::fill(uint64_t step, std::byte* slot, Permission) {
  uint64_t end = shape_.slot_header_bytes();
  uint64_t payload_bytes = 0;
  for (int node = 0; node < map_.nodes(); ++node) {
    set_offset(slot, node, end);
    end += fill_block(step, node, slot + end, &payload_bytes);
  }
  set_offset(slot, map_.nodes(), end);
  return payload_bytes;
}

uint64_t AlltoallPipeline::fill_block(uint64_t step, int node, std::byte* block,
                                      uint64_t* payload_bytes) {
  uint64_t end = shape_.block_header_bytes(node);
  for (int place = map_.first(node); place < map_.end(node); ++place) {
    set_offset(block, place - map_.first(node), end);
    if (place == map_.place()) continue;  // straight from input to output, see collect()
    const Range piece = sent_[static_cast<size_t>(place)].piece(step);
    const size_t bytes = piece.count() * size_;
    copy_(block + end, in_ + piece.begin * size_, bytes, context_.store);
    *payload_bytes += bytes;
    end += round_up(bytes, shape_.unit_bytes());
  }
  set_offset(block, map_.ranks_on(node), end);
  return end;
}

void AlltoallPipeline::send(uint64_t, int, const std::byte* slot) {
  for (int i = 1; i < map_.nodes(); ++i) {
    const int to = (map_.node() + i) % map_.nodes();
    const uint32_t begin = offset_at(slot, to);
    wire_->send(to, Channel::kExchange, slot + begin, offset_at(slot, to + 1) - begin);
  }
}

void AlltoallPipeline::receive(uint64_t step, int place) {
  wire_->receive(map_.node_at(place), Channel::kExchange,
                 landing(step) + shape_.landing_offset(place), shape_.landing_bytes(map_.node()));
}

uint64_t AlltoallPipeline::received_bytes(uint64_t step, int place) {
  const std::byte* block = landing(step) + shape_.landing_offset(place);
  return offset_at(block, map_.ranks_on(map_.node()));
}

uint64_t AlltoallPipeline::collect(uint64_t step) {
  const int own = map_.place();
  const int node = map_.node();
  uint64_t bytes = 0;
  for (int i = 0; i < map_.size(); ++i) {
    const int place = (own + i) % map_.size();  // not all from the same one at once
    const Range piece = received_[static_cast<size_t>(place)].piece(step);
    std::byte* to = out_ + piece.begin * size_;
    if (place == own) {
      const Range sent = sent_[static_cast<size_t>(own)].piece(step);
      copy_(to, in_ + sent.begin * size_, piece.count() * size_, context_.out_store);
      continue;
    }
    const std::byte* block = landing(step);
    if (map_.is_here(place)) {
      block = in_slot(place - map_.first(node), step);
      block += offset_at(block, node);
    } else {
      block += shape_.landing_offset(place);
    }
    copy_(to, block + offset_at(block, own - map_.first(node)), piece.count() * size_,
          context_.out_store);
    bytes += piece.count() * size_;
  }
  return bytes;
}

}  // namespace hsgd
