// kAlltoall: exchanges blocks with an individual count for each pair of ranks.
//
// Each rank knows only its own counts. All ranks sum one number per count; the numbers cancel if
// both sides agree, and show which counts differ if not.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "collectives/kinds/alltoall_layout.hpp"
#include "collectives/kinds/arguments.hpp"
#include "collectives/kinds/chunk_pipeline.hpp"
#include "collectives/kinds/collectives.hpp"
#include "collectives/kinds/zero_copy.hpp"
#include "core/base/calls.hpp"
#include "core/base/dtypes.hpp"
#include "core/base/error.hpp"
#include "core/base/fault_points.hpp"

namespace hsgd {
namespace {

// The pipeline. In each step a rank stages in its in ring the data for some ranks of one node;
// leaders send it to that node, where it lands in the only out ring, and receive the same from
// another one; each rank copies its data from there, or from its peers' in rings. Each byte crosses
// a link once, and costs 4 accesses inside a node.
class AlltoallPipeline final : public ChunkPipeline {
 public:
  AlltoallPipeline(Context& context, const Operation& operation, const AlltoallLayout& layout,
                   uint64_t pieces, const Stages& stages)
      : ChunkPipeline(context, stages),
        map_(context.map()),
        messages_(context.links().messages()),
        in_(static_cast<const std::byte*>(operation.in)),
        out_(static_cast<std::byte*>(operation.out)),
        sent_(blocks_of(operation.counts.of_rank, map_)),
        received_(blocks_of(operation.receive_counts, map_)),
        layout_(layout),
        pieces_(pieces),
        element_bytes_(operation.reduction.element_bytes) {
    for (Block& block : sent_) block.cut(pieces, layout.unit_bytes() / element_bytes_);
    for (Block& block : received_) block.cut(pieces, layout.unit_bytes() / element_bytes_);
    if (messages_ != nullptr) messages_->start();
  }

 private:
  // One step: counts over nodes, then groups of ranks on them, then pieces of blocks.
  struct Turn {
    int to;       // node
    int from;     // node
    Range ranks;  // local ranks that receive
    uint64_t piece;
  };
  Turn turn(uint64_t step) const {
    const auto groups = static_cast<uint64_t>(layout_.groups());
    const auto distance = static_cast<int>(step / pieces_ / groups);
    const int nodes = map_.nodes();
    return {(map_.node() + distance) % nodes, (map_.node() + nodes - distance) % nodes,
            layout_.group(step / pieces_ % groups), step % pieces_};
  }

  void stage(uint64_t step, std::byte* slot, Permission) override {
    const Turn turn = this->turn(step);
    const int first = map_.first(turn.to);
    const auto ranks = static_cast<uint64_t>(map_.ranks_on(turn.to));
    uint64_t end = layout_.header_bytes();
    for (uint64_t rank = turn.ranks.begin; rank < turn.ranks.end; ++rank) {
      set_offset(slot, static_cast<int>(rank - turn.ranks.begin), end);
      const int place = first + static_cast<int>(rank);
      if (rank >= ranks || place == map_.place()) continue;  // the own block: see gather()
      const Range piece = sent_[static_cast<size_t>(place)].piece(turn.piece);
      const size_t bytes = piece.count() * element_bytes_;
      context_.copy()(slot + end, in_ + piece.begin * element_bytes_, bytes, stages_.store);
      context_.intra_bytes() += bytes;
      end += round_up(bytes, layout_.unit_bytes());
    }
    set_offset(slot, static_cast<int>(turn.ranks.count()), end);
  }

  // Both sides use the same order of ranks, because messages between two leaders are matched in
  // order.
  void begin_exchange(uint64_t step) override {
    messages_->begin();
    const Turn turn = this->turn(step);
    if (turn.to == map_.node()) return;
    for (int rank = lane(); rank < map_.ranks_on(turn.from); rank += stages_.leaders) {
      messages_->receive(turn.from, Channel::kExchange, landing(step, rank),
                         layout_.landing_bytes());
    }
    const int receivers = static_cast<int>(turn.ranks.count());
    for (int rank = lane(); rank < local().size(); rank += stages_.leaders) {
      const std::byte* slot = in_slot(rank, step);
      messages_->send(turn.to, Channel::kExchange, slot, offset_at(slot, receivers));
    }
    HSGD_FAULT_POINT("between nodes: block sent");
  }

  void end_exchange(uint64_t step) override {
    const Turn turn = this->turn(step);
    if (turn.to == map_.node()) return;
    const int receivers = static_cast<int>(turn.ranks.count());
    for (int rank = lane(); rank < map_.ranks_on(turn.from); rank += stages_.leaders) {
      messages_->count_received(offset_at(landing(step, rank), receivers));
    }
  }

  void gather(uint64_t step) override {
    const Turn turn = this->turn(step);
    const auto own = static_cast<uint64_t>(local().rank());
    if (own < turn.ranks.begin || own >= turn.ranks.end) return;
    const int index = static_cast<int>(own - turn.ranks.begin);
    const int ranks = map_.ranks_on(turn.from);
    for (int i = 0; i < ranks; ++i) {
      const int rank = (local().rank() + i) % ranks;  // each starts at another rank
      const int place = map_.first(turn.from) + rank;
      const Range piece = received_[static_cast<size_t>(place)].piece(turn.piece);
      const size_t bytes = piece.count() * element_bytes_;
      std::byte* to = out_ + piece.begin * element_bytes_;
      if (place == map_.place()) {
        const Range sent = sent_[static_cast<size_t>(place)].piece(turn.piece);
        context_.copy()(to, in_ + sent.begin * element_bytes_, bytes, stages_.out_store);
        continue;
      }
      const std::byte* slot = turn.from == map_.node() ? in_slot(rank, step) : landing(step, rank);
      context_.copy()(to, slot + offset_at(slot, index), bytes, stages_.out_store);
      context_.intra_bytes() += bytes;
    }
  }

  // Returns the place for the data of a local rank of another node.
  std::byte* landing(uint64_t step, int rank) const {
    return out_slot(0, step) + static_cast<size_t>(rank) * layout_.landing_bytes();
  }

  const NodeMap& map_;
  StepMessages* messages_;  // on leaders of several nodes
  const std::byte* in_;
  std::byte* out_;
  std::vector<Block> sent_;      // by place
  std::vector<Block> received_;  // by place
  const AlltoallLayout& layout_;
  const uint64_t pieces_;       // pieces of each block
  const size_t element_bytes_;  // of an element
};

// small: a packet holds offsets, then the data for all other ranks

size_t packet_bytes(const Context& context) {
  const size_t oneshot_bytes = context.sizes().oneshot_bytes();
  // On one node both forms move as many bytes, and the small one waits once less; but above half a
  // cell staging and copying overlap in the large one (measured). If inputs may be in reach, one
  // copy pays off earlier.
  if (context.one_node())
    return context.shares() ? oneshot_bytes
                            : std::max(oneshot_bytes, context.sizes().cell_bytes() / 2);
  return oneshot_bytes / static_cast<size_t>(context.place().size) / sizeof(double) *
         sizeof(double);
}

// Returns the part of the input that this rank keeps; no packet holds it.
Range own_part(const Context& context, const Operation& operation) {
  const uint64_t* counts = operation.counts.of_rank;
  const uint64_t begin = std::accumulate(counts, counts + context.place().rank, uint64_t{0});
  return {begin, begin + counts[context.place().rank]};
}

void fill_packet(Context& context, const Operation& operation) {
  const Place& place = context.place();
  const size_t size = operation.reduction.element_bytes;
  std::byte* packet = context.local().packet(place.local_rank, context.sequence());
  const size_t header = offsets_bytes(place.size);
  uint64_t begin = header;
  for (int rank = 0; rank < place.size; ++rank) {
    set_offset(packet, rank, begin);
    if (rank != place.rank) begin += operation.counts.of_rank[rank] * size;
  }
  set_offset(packet, place.size, begin);
  const Range own = own_part(context, operation);
  const auto* in = static_cast<const std::byte*>(operation.in);
  const size_t before = own.begin * size;
  const size_t after = (operation.count - own.end) * size;
  if (before > 0) context.copy()(packet + header, in, before, Store::kOrdinary);
  if (after > 0)
    context.copy()(packet + header + before, in + own.end * size, after, Store::kOrdinary);
}

void take_packets(Context& context, const Operation& operation) {
  const size_t size = operation.reduction.element_bytes;
  const NodeMap& map = context.map();
  const LocalGroup& local = context.local();
  const int own = context.place().rank;
  auto* to = static_cast<std::byte*>(operation.out);
  for (int rank = 0; rank < map.size(); ++rank) {
    const size_t bytes = operation.receive_counts[rank] * size;
    if (bytes == 0) continue;
    if (rank == own) {
      const auto* in = static_cast<const std::byte*>(operation.in);
      std::memcpy(to, in + own_part(context, operation).begin * size, bytes);
    } else {
      const int place = map.place_of(rank);
      const std::byte* packet = context.one_node()
                                    ? local.packet(place, context.sequence())
                                    : local.result_packets(context.sequence()) +
                                          static_cast<size_t>(place) * packet_bytes(context);
      context.copy()(to, packet + offset_at(packet, own), bytes, Store::kOrdinary);
    }
    to += bytes;
    context.intra_bytes() += bytes;
  }
}

// counts: all ranks check them before data moves

ExchangeNote note_of(const Context& context, const Operation& operation,
                     const AlltoallLayout& layout) {
  ExchangeNote note;
  const Place& place = context.place();
  const auto me = static_cast<uint64_t>(place.rank);
  for (int rank = 0; rank < place.size; ++rank) {
    const auto other = static_cast<uint64_t>(rank);
    note.imbalance += mix_count(me, other, operation.counts.of_rank[rank]);
    note.imbalance -= mix_count(other, me, operation.receive_counts[rank]);
  }
  note.pieces = layout.pieces_needed(operation.counts.of_rank, operation.reduction.element_bytes);
  const uint64_t others = operation.count - operation.counts.of_rank[place.rank];
  const size_t whole = offsets_bytes(place.size) + others * operation.reduction.element_bytes;
  note.at_once = whole <= packet_bytes(context) ? 1 : 0;
  return note;
}

ExchangeNote notes_here(const Context& context) {
  ExchangeNote all;
  for (int rank = 0; rank < context.place().local_size; ++rank) {
    ExchangeNote note;
    std::memcpy(&note, context.local().payload(rank, context.sequence(), sizeof note), sizeof note);
    all.add(note);
  }
  return all;
}

size_t join(const std::vector<Payload>& parts, std::byte* out, bool) {
  std::byte* end = out;
  for (const Payload& part : parts) {
    if (part.bytes > 0) std::memcpy(end, part.data, part.bytes);
    end += part.bytes;
  }
  return static_cast<size_t>(end - out);
}

// Exchanges the notes between nodes; if all packets are small, every node gets all of them in the
// order of places.
ExchangeNote notes_between_nodes(Context& context) {
  const size_t stride = packet_bytes(context);
  const Place& place = context.place();
  LocalGroup& local = context.local();
  const uint64_t sequence = context.sequence();
  ExchangeNote all;
  if (place.leads(1)) {
    std::byte* packets = local.result_packets(sequence);
    context.lead(
        [&] {
          const ExchangeNote note = notes_here(context);
          if (note.at_once == 0) return Outgoing{{}, join, packets, note};
          for (int rank = 0; rank < place.local_size; ++rank) {
            const std::byte* packet = local.packet(rank, sequence);
            std::memcpy(packets + static_cast<size_t>(rank) * stride, packet,
                        offset_at(packet, place.size));
          }
          const size_t bytes = static_cast<size_t>(place.local_size) * stride;
          return Outgoing{{packets, bytes}, join, packets, note};
        },
        [&](const ExchangeNote& note) {
          std::memcpy(local.result_payload(sequence, sizeof note), &note, sizeof note);
        });
  }
  context.wait_for_result();
  std::memcpy(&all, local.result_payload(sequence, sizeof all), sizeof all);
  return all;
}

// Throws the error for ranks that disagree about one count. `call` begins the text; `from` and `to`
// are names.
[[noreturn]] void fail_counts(const std::string& call, const hsgd_label* label, int from,
                              uint64_t sent, int to, uint64_t expected, hsgd_dtype dtype) {
  const char* name = hsgd_dtype_name(dtype);
  Label known;
  fill_label(label, {}, &known);
  throw MismatchError(
      to,
      call + text(": rank %d sends %llu %s to rank %d, and rank %d expects %llu %s from it; "
                  "give the same count on both sides",
                  from, static_cast<unsigned long long>(sent), name, to, to,
                  static_cast<unsigned long long>(expected), name),
      side_of(from, known), side_of(to, known));
}

// Exchanges all counts after all ranks know that some differ, and reports which.
[[noreturn]] void fail_imbalance(Context& context, const Operation& operation) {
  const auto size = static_cast<size_t>(context.place().size);
  const RankNames& names = context.place().names;
  const std::string call = context.what();
  std::vector<uint64_t> mine(operation.counts.of_rank, operation.counts.of_rank + size);
  mine.insert(mine.end(), operation.receive_counts, operation.receive_counts + size);
  std::vector<uint64_t> all(size * mine.size());
  const std::vector<uint64_t> counts(size, mine.size());
  const hsgd_call gather =
      allgather_call(mine.data(), all.data(), counts.data(), HSGD_INT64, nullptr);
  const Operation exchange = kAllgather.operation(context, gather);
  context.begin(exchange.signature, operation.label);
  kAllgather.run(context, exchange);
  for (size_t from = 0; from < size; ++from) {
    for (size_t to = 0; to < size; ++to) {
      const uint64_t sent = all[from * mine.size() + to];
      const uint64_t expected = all[to * mine.size() + size + from];
      if (sent == expected) continue;
      fail_counts(call, operation.label, names.of(static_cast<int>(from)), sent,
                  names.of(static_cast<int>(to)), expected, operation.signature.dtype());
    }
  }
  HSGD_CHECK(!"counts that agree cancel out");
  std::abort();
}

// in place, on one node: ranks publish the offsets of their data in a shared buffer

std::byte* offsets_in_slot(const Context& context, int rank) {
  return context.local().in_slot(rank, context.base());
}

// Publishes the offsets and returns the shared buffer with this rank's input; nullptr if there is
// none, or if the others could not use it.
std::shared_ptr<SharedBuffer> tell_offsets(Context& context, const Operation& operation) {
  if (!context.one_node() || context.arena().empty()) return nullptr;
  std::shared_ptr<SharedBuffer> buffer = context.arena().find(operation.in, operation.bytes());
  if (buffer == nullptr) return nullptr;
  // This rank may use the slot after its peers have finished the step that it held before.
  context.wait_until([&] {
    return context.local().peers_freed(&Progress::gathered, context.base(), context.slots());
  });
  const std::vector<Block> sent = blocks_of(operation.counts.of_rank, context.map());
  const auto* in = static_cast<const std::byte*>(operation.in);
  std::byte* table = offsets_in_slot(context, context.place().local_rank);
  for (size_t rank = 0; rank < sent.size(); ++rank) {
    const uint64_t offset = static_cast<uint64_t>(in - buffer->own()) +
                            sent[rank].begin * operation.reduction.element_bytes;
    std::memcpy(table + rank * sizeof offset, &offset, sizeof offset);
  }
  return buffer;
}

void pick_blocks(Context& context, const Operation& operation, const SharedBuffer& buffer) {
  const std::vector<Block> received = blocks_of(operation.receive_counts, context.map());
  const size_t size = operation.reduction.element_bytes;
  const Store store = context.stores().into_output(operation);
  const auto own = static_cast<size_t>(context.place().local_rank);
  for (int i = 0; i < context.place().local_size; ++i) {
    const int peer = in_turn(context, i);
    const Block& block = received[static_cast<size_t>(peer)];
    uint64_t offset = 0;
    std::memcpy(&offset, offsets_in_slot(context, peer) + own * sizeof offset, sizeof offset);
    context.copy()(static_cast<std::byte*>(operation.out) + block.begin * size,
                   buffer.data(peer) + offset, block.count * size, store);
    context.intra_bytes() += block.count * size;
  }
}

void run(Context& context, const Operation& operation) {
  const AlltoallLayout layout(context.map(), context.sizes().block_step_bytes());
  ExchangeNote note = note_of(context, operation, layout);
  const std::shared_ptr<SharedBuffer> buffer = tell_offsets(context, operation);
  note.buffer = buffer != nullptr ? buffer->id() : 0;
  if (note.at_once == 1) fill_packet(context, operation);
  static_assert(sizeof note <= CellHeader::kInlineBytes, "the packet lies beside it");
  context.open(operation, &note, sizeof note);
  if (context.one_node()) {
    context.wait_for_headers();
    note = notes_here(context);
  } else {
    note = notes_between_nodes(context);
  }
  if (note.imbalance != 0) fail_imbalance(context, operation);
  if (note.at_once == 1) return take_packets(context, operation);
  if (note.buffer != 0) {
    return run_in_place(context, [&] { pick_blocks(context, operation, *buffer); });
  }
  Stages stages;
  stages.steps = layout.turns() * note.pieces;
  stages.leaders = context.place().leaders;
  stages.window = context.links().messages();
  stages.store = context.stores().into_ring(operation);
  stages.out_store = context.stores().into_output(operation);
  AlltoallPipeline(context, operation, layout, note.pieces, stages).run(operation);
}

void check(const Place& place, const hsgd_call& call) {
  check_type(call.dtype, HSGD_SUM);
  check_exchanged(checked_blocks(place, call.counts, call.dtype),
                  checked_blocks(place, call.receive_counts, call.dtype), call.in, call.out);
}

Operation alltoall(const Context& context, const hsgd_call& call) {
  const int size = context.place().size;
  if (size == 1 && call.counts[0] != call.receive_counts[0]) {
    fail_counts("alltoall", call.label, 0, call.counts[0], 0, call.receive_counts[0], call.dtype);
  }
  Operation operation = operation_of(context, call);
  operation.counts = {call.counts, size};
  operation.receive_counts = call.receive_counts;
  operation.count = std::accumulate(call.counts, call.counts + size, uint64_t{0});
  operation.signature =
      Signature::pack(HSGD_ALLTOALL, call.dtype, HSGD_SUM, 0, 0, hash_label(call.label));
  return operation;
}

}  // namespace

const CollectiveKind kAlltoall{check, alltoall, run};

void check_exchanged(const Blocks& sent, const Blocks& received, const void* in, const void* out) {
  check_buffers({in, sent.total, Buffer::kNowhere}, {out, received.total}, "two");
}

}  // namespace hsgd
