// Exchanges headers in rounds.
#include "network/rounds/header_exchange.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/error.hpp"
#include "core/base/fault_points.hpp"
#include "node/segments/segment_layout.hpp"

namespace hsgd {
namespace {

// Merges the headers of groups of nodes, in order. Keeps the first difference: within one group, or
// between two.
void add_header(WireHeader* all, const WireHeader& next) {
  all->note.add(next.note);
  all->stop |= next.stop;
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

size_t message_bytes(size_t payload_bytes) {
  return round_up(sizeof(WireHeader) + payload_bytes, kLine);
}

// Returns the bytes of all messages of a round, or of the message between partners.
size_t box_bytes(const RoundSchedule& rounds, size_t round_bytes, size_t fold_bytes) {
  return std::max(static_cast<size_t>(rounds.most_radix()) * round_bytes, fold_bytes);
}

}  // namespace

HeaderExchange::HeaderExchange(Transport& transport, const RoundSchedule& rounds, const Room& room,
                               WireCounters& counters)
    : transport_(transport),
      rounds_(rounds),
      counters_(counters),
      own_bytes_(message_bytes(room.payload)),
      round_bytes_(message_bytes(std::max(room.payload, room.part))),
      fold_bytes_(message_bytes(rounds.folds() ? std::max(room.payload, room.whole) : 0)),
      messages_(new std::byte[buffer_bytes(rounds, room)]),
      inbox_(messages_.get() + 2 * own_bytes_),
      outbox_(inbox_ + box_bytes(rounds, round_bytes_, fold_bytes_)),
      pending_(transport),
      node_(transport.node_rank()),
      partner_(rounds.partner(node_)) {}

size_t HeaderExchange::buffer_bytes(const RoundSchedule& rounds, const Room& room) {
  const size_t in_round = message_bytes(std::max(room.payload, room.part));
  const size_t folded = message_bytes(rounds.folds() ? std::max(room.payload, room.whole) : 0);
  return 2 * message_bytes(room.payload) + 2 * box_bytes(rounds, in_round, folded);
}

void HeaderExchange::start(const WireHeader& header, const Payload& payload, MergeFn merge,
                           std::byte* result) {
  merge_ = std::move(merge);
  parts_ = nullptr;
  result_ = result;
  begin(header);
  HSGD_CHECK(sizeof header + payload.bytes <= own_bytes_);
  header_of(own_)->payload_bytes = payload.bytes;
  if (payload.bytes > 0) std::memcpy(payload_of(own_), payload.data, payload.bytes);
  begin_stage();
  HSGD_FAULT_POINT("between nodes: header sent");
}

void HeaderExchange::start(const WireHeader& header, RoundPayload* parts) {
  merge_ = nullptr;
  parts_ = parts;
  result_ = nullptr;
  begin(header);
  begin_stage();
  HSGD_FAULT_POINT("between nodes: header sent");
}

void HeaderExchange::begin(const WireHeader& header) {
  own_ = messages_.get();
  spare_ = own_ + own_bytes_;
  sequence_ = header.sequence;
  *header_of(own_) = header;
  header_of(own_)->payload_bytes = 0;
  stage_ = kTake;
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
    if (is_core) receive(partner_, incoming(0), fold_bytes_);
    if (!is_core) send_part(rounds_.core_of(node_), 0);
  }
  if (stage_ == kRounds && is_core) begin_round();
  if (stage_ == kGive && partner_ >= 0) {
    if (is_core) send(partner_);
    if (!is_core) receive(partner_, spare_, own_bytes_);
  }
}

void HeaderExchange::begin_round() {
  const int core = rounds_.core_of(node_);
  const int radix = rounds_.radix(round_);
  const int own = rounds_.index(round_, core);
  for (int i = 1; i < radix; ++i) {
    const int from = (own + radix - i) % radix;
    receive(rounds_.node_of(rounds_.member(round_, core, from)), incoming(from), round_bytes_);
  }
  for (int i = 1; i < radix; ++i) {
    const int to = (own + i) % radix;
    send_part(rounds_.member(round_, core, to), to);
  }
}

void HeaderExchange::end_stage() {
  const bool is_core = rounds_.is_core(node_);
  if (stage_ == kTake && is_core) {
    if (partner_ >= 0) merge({own_, incoming(0)}, false);
    if (partner_ < 0 && rounds_.folds() && sends_parts()) parts_->merge(RoundPayload::kFold, {});
  }
  if (stage_ == kRounds && is_core) merge_round();
  if (stage_ == kGive && partner_ >= 0 && !is_core) {
    std::swap(own_, spare_);
    const WireHeader& all = header();
    HSGD_CHECK(all.sequence == sequence_);
    HSGD_CHECK(sizeof all + all.payload_bytes <= own_bytes_);
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
    parts.push_back(i == own ? own_ : incoming(i));
  }
  merge(parts, round_ + 1 == rounds_.rounds());
}

// Merges payloads. Data of all nodes goes directly to the result; it is also put beside the header
// only if it must be passed on.
void HeaderExchange::merge(const std::vector<std::byte*>& parts, bool is_last) {
  WireHeader all = *header_of(parts[0]);
  std::vector<Payload> payloads;
  for (size_t i = 0; i < parts.size(); ++i) {
    const WireHeader& header = *header_of(parts[i]);
    const size_t longest = stage_ == kTake ? fold_bytes_ : round_bytes_;
    HSGD_CHECK(header.sequence == sequence_ && sizeof header + header.payload_bytes <= longest);
    if (i > 0) add_header(&all, header);
    if (parts[i] != own_) counters_.bytes_received += sizeof header + header.payload_bytes;
    payloads.push_back({payload_of(parts[i]), header.payload_bytes});
  }
  all.payload_bytes = 0;
  if (all.status == HSGD_OK && parts_ != nullptr) {
    parts_->merge(stage_ == kTake ? RoundPayload::kFold : round_, payloads);
  }
  if (all.status == HSGD_OK && merge_) {
    std::byte* out = is_last ? result_ : payload_of(spare_);
    all.payload_bytes = merge_(payloads, out, is_last);
    HSGD_CHECK(sizeof all + all.payload_bytes <= own_bytes_);
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

// Sends a message. This node's own data lies behind its header; each part goes behind a header of
// its own.
void HeaderExchange::send_part(int core, int index) {
  const int node = stage_ == kTake ? partner_ : rounds_.node_of(core);
  if (!sends_parts()) return send(node);
  std::byte* message = outgoing(index);
  WireHeader& out = *header_of(message);
  out = header();
  out.payload_bytes =
      parts_->write(stage_ == kTake ? RoundPayload::kFold : round_, core, payload_of(message));
  HSGD_CHECK(sizeof out + out.payload_bytes <= (stage_ == kTake ? fold_bytes_ : round_bytes_));
  pending_.send(node, Channel::kHeader, message, sizeof out + out.payload_bytes, counters_);
}

// Posts a receive. A node that called with another size sends another length, so each receive
// allows the longest.
void HeaderExchange::receive(int node, std::byte* message, size_t capacity_bytes) {
  WireCounters longest;
  pending_.receive(node, Channel::kHeader, message, capacity_bytes, longest);
}

}  // namespace hsgd
