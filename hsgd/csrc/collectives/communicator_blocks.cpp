// The collectives whose ranks have different parts: reduce_scatter, allgather, alltoall.
//
// Owns the choice between their regimes, their one-shot forms, and how ranks learn that an alltoall
// does not add up: each knows only its own counts, so they add up one number per count, which
// cancel when both sides agree. Nothing here waits but through Communicator::wait().
#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/error.hpp"
#include "collectives/communicator.hpp"
#include "collectives/exchange_pipeline.hpp"
#include "collectives/scatter_pipeline.hpp"
#include "collectives/zero_copy_blocks.hpp"

namespace hsgd {
namespace {

// A small alltoall: what a rank sends to all others, behind a table of where that for each begins.
size_t table_bytes(int size) { return (static_cast<size_t>(size) + 1) * sizeof(uint32_t); }

uint32_t entry(const std::byte* table, int index) {
  uint32_t value = 0;
  std::memcpy(&value, table + static_cast<size_t>(index) * sizeof value, sizeof value);
  return value;
}

[[noreturn]] void fail_counts(const std::string& what, const hsgd_label* called, int from,
                              uint64_t sent, int to, uint64_t expected, hsgd_dtype dtype) {
  const char* name = hsgd_dtype_name(dtype);
  Label label;
  fill_label(called, {}, &label);
  throw MismatchError(
      to,
      what + text(": rank %d sends %llu %s to rank %d, and rank %d expects %llu %s from it; "
                  "give the same count on both sides",
                  from, static_cast<unsigned long long>(sent), name, to, to,
                  static_cast<unsigned long long>(expected), name),
      side_of(from, label), side_of(to, label));
}

}  // namespace

// --- entry ---

void Communicator::reduce_scatter(const void* in, void* out, const uint64_t* counts,
                                  hsgd_dtype dtype, hsgd_op op, const hsgd_label* label) {
  Operation operation;
  operation.counts = {counts, place_.size};
  operation.count = std::accumulate(counts, counts + place_.size, uint64_t{0});
  operation.signature = Signature::pack(Kind::kReduceScatter, dtype, op, 0, operation.count,
                                        hash_label(label, operation.counts));
  operation.label = label;
  operation.in = in;
  operation.out = out;
  operation.part.begin = std::accumulate(counts, counts + place_.rank, uint64_t{0});
  operation.part.end = operation.part.begin + counts[place_.rank];
  operation.reduction = {select_reduce(dtype, op, isa_), copy_, hsgd_dtype_bytes(dtype),
                         op == HSGD_MEAN ? static_cast<double>(place_.size) : 1.0,
                         narrowing_of(dtype, op)};
  run(operation);
}

Communicator::Operation Communicator::allgather_of(const void* in, void* out,
                                                   const uint64_t* counts, hsgd_dtype dtype,
                                                   const hsgd_label* label) const {
  Operation operation;
  operation.counts = {counts, place_.size};
  operation.count = std::accumulate(counts, counts + place_.size, uint64_t{0});
  operation.signature = Signature::pack(Kind::kAllgather, dtype, HSGD_SUM, 0, operation.count,
                                        hash_label(label, operation.counts));
  operation.label = label;
  operation.in = in;
  operation.out = out;
  operation.reduction = {nullptr, copy_, hsgd_dtype_bytes(dtype), 1.0};
  return operation;
}

void Communicator::allgather(const void* in, void* out, const uint64_t* counts, hsgd_dtype dtype,
                             const hsgd_label* label) {
  Operation operation = allgather_of(in, out, counts, dtype, label);
  run(operation);
}

void Communicator::alltoall(const void* in, const uint64_t* send_counts, void* out,
                            const uint64_t* receive_counts, hsgd_dtype dtype,
                            const hsgd_label* label) {
  if (place_.size == 1 && send_counts[0] != receive_counts[0]) {
    fail_counts("alltoall", label, 0, send_counts[0], 0, receive_counts[0], dtype);
  }
  Operation operation;
  operation.counts = {send_counts, place_.size};
  operation.receive_counts = receive_counts;
  operation.count = std::accumulate(send_counts, send_counts + place_.size, uint64_t{0});
  operation.signature = Signature::pack(Kind::kAlltoall, dtype, HSGD_SUM, 0, 0, hash_label(label));
  operation.label = label;
  operation.in = in;
  operation.out = out;
  operation.reduction = {nullptr, copy_, hsgd_dtype_bytes(dtype), 1.0};
  run(operation);
}

void Communicator::run_on_blocks(const Operation& operation) {
  switch (operation.signature.kind()) {
    case Kind::kReduceScatter:
      return run_reduce_scatter(operation);
    case Kind::kAllgather:
      return run_allgather(operation);
    default:
      return run_alltoall(operation);
  }
}

// --- reduce_scatter ---

// True when it is done: inputs are read where they lie.
bool Communicator::reduce_scatter_in_place(const Operation& operation) {
  if (place_.node_count > 1) return false;
  const auto shared = shared_arguments(operation, operation.bytes(), 0);
  if (!shared) return false;
  const Range own = operation.part;
  run_directly(operation, [&](const PipelineContext& context) {
    reduce_block(context, *shared, {own.begin, own.count(), 0}, operation.reduction, operation.out);
  });
  return true;
}

void Communicator::run_reduce_scatter(const Operation& operation) {
  if (operation.count == 0 || operation.bytes() <= tuning_.oneshot_bytes) {
    place_.node_count == 1 ? small_on_node(operation) : small_between_nodes(operation);
    return;
  }
  if (reduce_scatter_in_place(operation)) return;
  const size_t size = operation.reduction.element_bytes;
  BlockTable table(operation.counts.of_rank, map_, size);
  table.cut(ReduceScatterPipeline::steps_needed(table, block_step_bytes(), size));
  const Mailboxes mailboxes = slices_ != nullptr ? slices_->mailboxes() : Mailboxes{};
  ReduceScatterPipeline pipeline(staged_context(place_.leaders, operation), operation.in,
                                 operation.out, table, operation.reduction, messages_.get(),
                                 mailboxes);
  run_pipeline(pipeline, operation, table.steps());
}

// --- allgather ---

// True when it is done: blocks are read where they lie.
bool Communicator::allgather_in_place(const Operation& operation) {
  if (place_.node_count > 1) return false;
  const size_t size = operation.reduction.element_bytes;
  const uint64_t* counts = operation.counts.of_rank;
  const auto shared = shared_arguments(operation, counts[place_.rank] * size, 0);
  if (!shared) return false;
  run_directly(operation, [&](const PipelineContext& context) {
    join_blocks(context, *shared, blocks_of(counts, map_), size, copy_, operation.out);
  });
  return true;
}

void Communicator::run_allgather(const Operation& operation) {
  const size_t size = operation.reduction.element_bytes;
  const uint64_t* counts = operation.counts.of_rank;
  const bool one_node = place_.node_count == 1;
  // Between nodes local rank 0 has one cell for the whole result.
  const uint64_t held =
      one_node ? *std::max_element(counts, counts + place_.size) : operation.count;
  // Blocks may lie in reach, from where they are copied once: that pays earlier.
  const size_t oneshot_bytes = tuning_.oneshot_bytes / (one_node && shares_ ? 2 : 1);
  if (held * size <= oneshot_bytes) {
    one_node ? small_allgather_on_node(operation) : small_allgather_between_nodes(operation);
    return;
  }
  if (allgather_in_place(operation)) return;
  BlockTable table(counts, map_, size);
  const uint64_t blocks = one_node ? 1 : static_cast<uint64_t>(place_.size);
  table.cut(steps_for(held, block_step_bytes() / size, blocks * table.line()));
  AllgatherPipeline pipeline(staged_context(place_.leaders, operation), operation.in, operation.out,
                             table, size, copy_, select_reduce(HSGD_UINT8, HSGD_SUM, isa_),
                             messages_.get());
  run_pipeline(pipeline, operation, table.steps());
}

void Communicator::small_allgather_on_node(const Operation& operation) {
  const size_t size = operation.reduction.element_bytes;
  const uint64_t* counts = operation.counts.of_rank;
  open(operation, operation.in, counts[place_.rank] * size);
  wait_for_headers();
  auto* to = static_cast<std::byte*>(operation.out);
  for (int rank = 0; rank < place_.size; ++rank) {
    const size_t bytes = counts[rank] * size;
    const void* from = rank == place_.rank ? operation.in : local_.payload(rank, sequence_, bytes);
    if (from != to && bytes > 0) std::memcpy(to, from, bytes);
    to += bytes;
  }
  counters_.intra_bytes += operation.bytes();
}

void Communicator::small_allgather_between_nodes(const Operation& operation) {
  const size_t size = operation.reduction.element_bytes;
  const size_t bytes = operation.bytes();
  const auto bytes_of = [&](int place) {
    return operation.counts.of_rank[map_.rank(place)] * size;
  };
  open(operation, operation.in, bytes_of(map_.place()));
  if (place_.local_rank == 0) {
    std::byte* result = local_.result_payload(sequence_, bytes);
    lead(
        [&] {
          std::byte* end = result;
          for (int rank = 0; rank < place_.local_size; ++rank) {
            const size_t part = bytes_of(map_.first(map_.node()) + rank);
            if (part > 0) std::memcpy(end, local_.payload(rank, sequence_, part), part);
            end += part;
          }
          return Outgoing{result, static_cast<size_t>(end - result), {}};
        },
        [&] {
          const std::vector<Block> blocks = blocks_of(operation.counts.of_rank, map_);
          for (int place = 0; place < map_.size();) {
            const std::byte* from = headers_->payload(map_.node_at(place));
            for (const int end = map_.end(map_.node_at(place)); place < end; ++place) {
              const size_t part = bytes_of(place);
              std::memcpy(result + blocks[static_cast<size_t>(place)].begin * size, from, part);
              from += part;
            }
          }
        });
  }
  wait_for_result();
  if (bytes > 0) std::memcpy(operation.out, local_.result_payload(sequence_, bytes), bytes);
  counters_.intra_bytes += bytes;
}

// --- alltoall ---

// Room for what one rank sends at once.
size_t Communicator::packet_bytes() const {
  if (place_.node_count == 1) return tuning_.oneshot_bytes;
  return tuning_.oneshot_bytes / static_cast<size_t>(place_.size) / sizeof(double) * sizeof(double);
}

ExchangeNote Communicator::note_of(const Operation& operation, const AlltoallShape& shape) const {
  ExchangeNote note;
  const auto me = static_cast<uint64_t>(place_.rank);
  const size_t size = operation.reduction.element_bytes;
  for (int rank = 0; rank < place_.size; ++rank) {
    const auto other = static_cast<uint64_t>(rank);
    note.imbalance += mix_count(me, other, operation.counts.of_rank[rank]);
    note.imbalance -= mix_count(other, me, operation.receive_counts[rank]);
  }
  note.steps = shape.steps_needed(operation.counts.of_rank, size);
  note.at_once = table_bytes(place_.size) + operation.bytes() <= packet_bytes() ? 1 : 0;
  return note;
}

// The shared buffer that holds this rank's input, of which it tells the others the places; nullptr
// when there is none, or they could not use it.
std::shared_ptr<SharedBuffer> Communicator::tell_places_of(const Operation& operation) {
  if (place_.node_count > 1 || arena_.empty()) return nullptr;
  std::shared_ptr<SharedBuffer> buffer = arena_.find(operation.in, operation.bytes());
  if (buffer == nullptr) return nullptr;
  // The slot is this rank's when its peers have finished the step that it held before.
  wait([&] {
    return local_.peers_freed(&Progress::gathered, base_, options_.slots) ? Step::kDone
                                                                          : Step::kIdle;
  });
  tell_places(pipeline_context(0, operation), blocks_of(operation.counts.of_rank, map_).data(),
              static_cast<const std::byte*>(operation.in), *buffer,
              operation.reduction.element_bytes);
  return buffer;
}

void Communicator::run_alltoall(const Operation& operation) {
  const AlltoallShape shape(map_, block_step_bytes());
  ExchangeNote note = note_of(operation, shape);
  const std::shared_ptr<SharedBuffer> buffer = tell_places_of(operation);
  note.buffer = buffer != nullptr ? buffer->id() : 0;
  if (note.at_once == 1) fill_packet(operation);
  static_assert(sizeof note <= CellHeader::kInlineBytes, "the packet lies beside it");
  open(operation, &note, sizeof note);
  note = place_.node_count == 1 ? notes_on_node() : notes_between_nodes();
  if (note.imbalance != 0) fail_imbalance(operation);
  if (note.at_once == 1) return take_packets(operation);
  if (note.buffer != 0) {
    return run_directly(operation, [&](const PipelineContext& context) {
      pick_blocks(context, *buffer, blocks_of(operation.receive_counts, map_),
                  operation.reduction.element_bytes, copy_, operation.out);
    });
  }
  const uint64_t* counts = operation.counts.of_rank;
  AlltoallPipeline pipeline(pipeline_context(place_.leaders, operation), operation.in,
                            operation.out, blocks_of(counts, map_),
                            blocks_of(operation.receive_counts, map_), note.steps, shape, map_,
                            operation.reduction.element_bytes, copy_, messages_.get());
  wait([&] { return pipeline.step(Permission::kGranted); });
  finish_steps(note.steps);
}

void Communicator::fill_packet(const Operation& operation) {
  std::byte* packet = local_.packet(place_.local_rank, sequence_);
  auto begin = static_cast<uint32_t>(table_bytes(place_.size));
  for (int rank = 0; rank <= place_.size; ++rank) {
    std::memcpy(packet + static_cast<size_t>(rank) * sizeof begin, &begin, sizeof begin);
    if (rank == place_.size) break;
    begin +=
        static_cast<uint32_t>(operation.counts.of_rank[rank] * operation.reduction.element_bytes);
  }
  if (operation.count > 0) {
    std::memcpy(packet + table_bytes(place_.size), operation.in, operation.bytes());
  }
}

ExchangeNote Communicator::notes_here() const {
  ExchangeNote all;
  for (int rank = 0; rank < place_.local_size; ++rank) {
    ExchangeNote note;
    std::memcpy(&note, local_.payload(rank, sequence_, sizeof note), sizeof note);
    all.add(note);
  }
  return all;
}

ExchangeNote Communicator::notes_on_node() {
  wait_for_headers();
  return notes_here();
}

// Every node hears the packets of all ranks, when all are small, in the order of places.
ExchangeNote Communicator::notes_between_nodes() {
  const size_t stride = packet_bytes();
  ExchangeNote all;
  if (place_.local_rank == 0) {
    std::byte* packets = local_.result_packets(sequence_);
    lead(
        [&] {
          const ExchangeNote note = notes_here();
          if (note.at_once == 0) return Outgoing{nullptr, 0, note};
          for (int rank = 0; rank < place_.local_size; ++rank) {
            const std::byte* packet = local_.packet(rank, sequence_);
            std::memcpy(packets + static_cast<size_t>(rank) * stride, packet,
                        entry(packet, place_.size));
          }
          return Outgoing{packets, static_cast<size_t>(place_.local_size) * stride, note};
        },
        [&] {
          for (int node = 0; node < map_.nodes(); ++node) all.add(headers_->header(node).note);
          std::memcpy(local_.result_payload(sequence_, sizeof all), &all, sizeof all);
          if (all.at_once == 0) return;
          for (int node = 0; node < map_.nodes(); ++node) {
            std::memcpy(packets + static_cast<size_t>(map_.first(node)) * stride,
                        headers_->payload(node), static_cast<size_t>(map_.ranks_on(node)) * stride);
          }
        });
  }
  wait_for_result();
  std::memcpy(&all, local_.result_payload(sequence_, sizeof all), sizeof all);
  return all;
}

void Communicator::take_packets(const Operation& operation) {
  const size_t size = operation.reduction.element_bytes;
  const size_t stride = packet_bytes();
  const std::vector<Block> blocks = blocks_of(operation.receive_counts, map_);
  for (int place = 0; place < map_.size(); ++place) {
    const std::byte* packet = place_.node_count == 1 ? local_.packet(place, sequence_)
                                                     : local_.result_packets(sequence_) +
                                                           static_cast<size_t>(place) * stride;
    const Block& block = blocks[static_cast<size_t>(place)];
    if (block.count == 0) continue;
    std::memcpy(static_cast<std::byte*>(operation.out) + block.begin * size,
                packet + entry(packet, place_.rank), block.count * size);
    counters_.intra_bytes += block.count * size;
  }
}

// All ranks know that some counts differ. Now they exchange all of them, to say which.
void Communicator::fail_imbalance(const Operation& operation) {
  const auto size = static_cast<size_t>(place_.size);
  const std::string call = what();
  std::vector<uint64_t> mine(operation.counts.of_rank, operation.counts.of_rank + size);
  mine.insert(mine.end(), operation.receive_counts, operation.receive_counts + size);
  std::vector<uint64_t> all(size * mine.size());
  const std::vector<uint64_t> counts(size, mine.size());
  const Operation exchange =
      allgather_of(mine.data(), all.data(), counts.data(), HSGD_INT64, nullptr);
  begin_collective(exchange.signature);
  run_allgather(exchange);
  for (size_t from = 0; from < size; ++from) {
    for (size_t to = 0; to < size; ++to) {
      const uint64_t sent = all[from * mine.size() + to];
      const uint64_t expected = all[to * mine.size() + size + from];
      if (sent == expected) continue;
      fail_counts(call, operation.label, static_cast<int>(from), sent, static_cast<int>(to),
                  expected, operation.signature.dtype());
    }
  }
  HSGD_CHECK(!"counts that agree cancel out");
  std::abort();
}

}  // namespace hsgd
