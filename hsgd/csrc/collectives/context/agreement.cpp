// Agreement of Context: checks that all ranks called the same collective.
//
// Inside a node each rank reads all headers. Between nodes the first leader exchanges them and
// publishes the result.
#include <algorithm>

#include "collectives/context/context.hpp"
#include "core/base/error.hpp"
#include "core/base/fault_points.hpp"

namespace hsgd {

// Waits on one node for all headers; throws if ranks differ.
void Context::wait_for_headers() {
  wait_until([&] { return headers_open(); });
  require_agreement();
}

void Context::require_agreement() {
  Call sides[2];
  if (!headers_agree(sides)) fail_mismatch(sides);
  if (group_->stops(call_.sequence)) see_stop();
  if (stores_.compares()) learn_cost();
}

// Passes the highest cost in the headers to the store tuner. All ranks of the node see the same
// headers and so make the same choice.
void Context::learn_cost() {
  uint64_t most = 0;
  for (int rank = 0; rank < place_.local_size; ++rank)
    most = std::max(most, group_->cost(rank, call_.sequence));
  stores_.learn(most);
}

// Waits until the first leader has heard from all nodes and has published the result.
void Context::wait_for_result() {
  wait_until([&] { return group_->has_result(call_.sequence); });
  require_result();
}

// Throws if the published result says that ranks differ.
void Context::require_result() {
  if (group_->result_status(call_.sequence) == HSGD_ERR_SIGNATURE)
    fail_mismatch(group_->mismatch());
  if (group_->result_stops(call_.sequence)) see_stop();
}

bool Context::headers_open() {
  if (group_->combines()) return group_->all_opened(call_.sequence);
  while (call_.open_seen < place_.local_size && group_->is_open(call_.open_seen, call_.sequence))
    ++call_.open_seen;
  return call_.open_seen == place_.local_size;
}

// Returns true if all headers of the node agree; otherwise sets `sides` to local rank 0 and the
// first rank that differs from it. The answer is the same on all ranks of the node.
bool Context::headers_agree(Call sides[2]) const {
  if (group_->combines() && !group_->differ(call_.sequence)) return true;
  const Signature& first = group_->signature(0, call_.sequence);
  for (int rank = 1; rank < place_.local_size; ++rank) {
    if (group_->signature(rank, call_.sequence) == first) continue;
    sides[0] = group_->call(0, call_.sequence);
    sides[1] = group_->call(rank, call_.sequence);
    return false;
  }
  return true;
}

void Context::fail_mismatch(const Call sides[2]) const {
  throw MismatchError(sides[1].rank,
                      describe_mismatch(user_sequence(), sides[0], sides[1], place_.names),
                      side_of(sides[0]), side_of(sides[1]));
}

// Starts the exchange of headers: the first leader sends this node's call, or that its ranks
// differ.
void Context::start_headers(const Outgoing& outgoing) {
  WireHeader header{};
  header.note = outgoing.note;
  header.stop = group_->stops(call_.sequence) ? 1 : 0;
  header.sequence = call_.sequence;
  Call sides[2] = {group_->call(0, call_.sequence), Call{}};
  const bool agree = headers_agree(sides);
  if (!agree) header.status = HSGD_ERR_SIGNATURE;
  header.call = sides[0];
  header.other = sides[1];
  if (agree && outgoing.first_step != nullptr) {
    links_->headers().start(header, outgoing.first_step);
  } else {
    links_->headers().start(header, agree ? outgoing.payload : Payload{}, outgoing.merge,
                            outgoing.result);
  }
  call_.headers_started = true;
}

void Context::lead(const std::function<Outgoing()>& collect,
                   const std::function<void(const ExchangeNote&)>& conclude) {
  wait_until([&] { return headers_open(); });
  Call sides[2];
  const Outgoing outgoing = headers_agree(sides) ? collect() : Outgoing{};
  at_level(record(), &hsgd_record::inter, [&] {
    start_headers(outgoing);
    return true;
  });
  wait_until([&] {
    return at_level(record(), &hsgd_record::inter, [&] { return links_->headers().done(); });
  });
  const hsgd_status status = judge_headers();
  const WireHeader& header = links_->headers().header();
  if (status == HSGD_OK && conclude) conclude(header.note);
  HSGD_FAULT_POINT("between nodes: result not published");
  group_->publish_result(call_.sequence, status, header.stop != 0);
  HSGD_FAULT_POINT("between nodes: result published");
}

// Compares the headers of all nodes; the answer is the same on all nodes.
hsgd_status Context::judge_headers() {
  const WireHeader& header = links_->headers().header();
  if (header.status == HSGD_OK) return HSGD_OK;
  group_->mismatch()[0] = header.call;
  group_->mismatch()[1] = header.other;
  return HSGD_ERR_SIGNATURE;
}

// Returns whether the pipeline may move data. Throws if ranks differ.
Permission Context::permission(const FirstStepFn& first_step) {
  if (!headers_open()) return Permission::kUnknown;
  if (one_node()) {
    require_agreement();
    return Permission::kGranted;
  }
  Call sides[2];
  call_.node_agrees = call_.node_agrees || headers_agree(sides);
  const Permission unknown = call_.node_agrees ? Permission::kOnNode : Permission::kUnknown;
  if (place_.leads(1) && !group_->has_result(call_.sequence)) {
    if (!call_.headers_started) {
      Outgoing outgoing;
      if (call_.node_agrees && first_step) {
        const std::optional<RoundPayload*> first = first_step();
        if (!first) return unknown;
        outgoing.first_step = *first;
      }
      at_level(record(), &hsgd_record::inter, [&] {
        start_headers(outgoing);
        return true;
      });
    }
    const bool done =
        at_level(record(), &hsgd_record::inter, [&] { return links_->headers().done(); });
    if (!done) return unknown;
    const hsgd_status status = judge_headers();
    group_->publish_result(call_.sequence, status, links_->headers().header().stop != 0);
    HSGD_FAULT_POINT("between nodes: permission published");
  }
  if (!group_->has_result(call_.sequence)) return unknown;
  require_result();
  return Permission::kGranted;
}

}  // namespace hsgd
