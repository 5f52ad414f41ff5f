// Rounds of headers.
#include "internode/header_exchange.hpp"

#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "base/fault_points.hpp"
#include "node/segment_layout.hpp"

namespace hsgd {
namespace {

// Of groups of nodes in order: the first difference within one of them, or between two.
void add_header(WireHeader* all, const WireHeader& next) {
  all->note.add(next.note);
  if (all->status != HSGD_OK) return;
  all->status = next.status;
  if (next.status != HSGD_OK) {
    all->call = next.call;
    all->other = next.other;
  } else if (!(next.call.signature == all->call.signature)) {
    all->status = HSGD_ERR_SIGNATURE;
    all->other = next.call;
  }
}

}  // namespace

HeaderExchange::HeaderExchange(Transport& transport, const RoundSchedule& rounds,
                               size_t payload_bytes, WireCounters& counters)
    : transport_(transport),
      rounds_(rounds),
      counters_(counters),
      stride_(round_up(sizeof(WireHeader) + payload_bytes, kLine)),
      messages_(new std::byte[stride_ * static_cast<size_t>(rounds.most_radix() + 2)]),
      pending_(transport),
      node_(transport.node_rank()),
      partner_(rounds.partner(node_)) {}

void HeaderExchange::start(const WireHeader& header, const Payload& payload, MergeFn merge,
                           std::byte* result) {
  own_ = message(0);
  spare_ = message(1);
  merge_ = std::move(merge);
  result_ = result;
  sequence_ = header.sequence;
  HSGD_CHECK(sizeof header + payload.bytes <= stride_);
  *header_of(own_) = header;
  header_of(own_)->payload_bytes = payload.bytes;
  if (payload.bytes > 0) std::memcpy(payload_of(own_), payload.data, payload.bytes);
  stage_ = kTake;
  begin_stage();
  HSGD_FAULT_POINT("between nodes: header sent");
}

bool HeaderExchange::done() {
  while (stage_ != kDone) {
    if (!pending_.all_done()) return false;
    end_stage();
    next_stage();
    begin_stage();
  }
  return true;
}

void HeaderExchange::begin_stage() {
  const bool is_core = rounds_.is_core(node_);
  if (stage_ == kTake && partner_ >= 0) {
    if (is_core) receive(partner_, message(2));
    if (!is_core) send(partner_);
  }
  if (stage_ == kRounds && is_core) begin_round();
  if (stage_ == kGive && partner_ >= 0) {
    if (is_core) send(partner_);
    if (!is_core) receive(partner_, spare_);
  }
}

void HeaderExchange::begin_round() {
  const int core = rounds_.core_of(node_);
  const int radix = rounds_.radix(round_);
  const int own = rounds_.index(round_, core);
  for (int i = 1; i < radix; ++i) {
    const int from = (own + radix - i) % radix;
    receive(rounds_.node_of(rounds_.member(round_, core, from)), message(2 + from));
  }
  for (int i = 1; i < radix; ++i) {
    send(rounds_.node_of(rounds_.member(round_, core, (own + i) % radix)));
  }
}

void HeaderExchange::end_stage() {
  const bool is_core = rounds_.is_core(node_);
  if (stage_ == kTake && partner_ >= 0 && is_core) merge({own_, message(2)}, false);
  if (stage_ == kRounds && is_core) merge_round();
  if (stage_ == kGive && partner_ >= 0 && !is_core) {
    std::swap(own_, spare_);
    const WireHeader& all = header();
    HSGD_CHECK(all.sequence == sequence_);
    counters_.bytes_received += sizeof all + all.payload_bytes;
    if (all.status == HSGD_OK && all.payload_bytes > 0) {
      std::memcpy(result_, payload_of(own_), all.payload_bytes);
    }
  }
}

void HeaderExchange::next_stage() {
  if (stage_ == kRounds && rounds_.is_core(node_) && round_ + 1 < rounds_.rounds()) {
    ++round_;
    return;
  }
  stage_ = static_cast<Stage>(stage_ + 1);
  round_ = 0;
}

void HeaderExchange::merge_round() {
  const int own = rounds_.index(round_, rounds_.core_of(node_));
  std::vector<std::byte*> parts;
  for (int i = 0; i < rounds_.radix(round_); ++i) {
    parts.push_back(i == own ? own_ : message(2 + i));
  }
  merge(parts, round_ + 1 == rounds_.rounds());
}

// What all nodes have goes straight to the result, and beside the header only where it must be
// passed on.
void HeaderExchange::merge(const std::vector<std::byte*>& parts, bool is_last) {
  WireHeader all = *header_of(parts[0]);
  std::vector<Payload> payloads;
  for (size_t i = 0; i < parts.size(); ++i) {
    const WireHeader& header = *header_of(parts[i]);
    HSGD_CHECK(header.sequence == sequence_ && sizeof header + header.payload_bytes <= stride_);
    if (i > 0) add_header(&all, header);
    if (parts[i] != own_) counters_.bytes_received += sizeof header + header.payload_bytes;
    payloads.push_back({payload_of(parts[i]), header.payload_bytes});
  }
  all.payload_bytes = 0;
  if (all.status == HSGD_OK && merge_) {
    std::byte* out = is_last ? result_ : payload_of(spare_);
    all.payload_bytes = merge_(payloads, out, is_last);
    HSGD_CHECK(sizeof all + all.payload_bytes <= stride_);
    if (is_last && partner_ >= 0 && all.payload_bytes > 0) {
      std::memcpy(payload_of(spare_), result_, all.payload_bytes);
    }
  }
  *header_of(spare_) = all;
  std::swap(own_, spare_);
}

void HeaderExchange::send(int node) {
  pending_.send(node, Channel::kHeader, own_, sizeof(WireHeader) + header().payload_bytes,
                counters_);
}

// A node that called with another size sends another length, so every receive takes the longest.
void HeaderExchange::receive(int node, std::byte* message) {
  WireCounters longest;
  pending_.receive(node, Channel::kHeader, message, stride_, longest);
}

}  // namespace hsgd
