// What travels behind the headers, in the rounds in which these go.
//
// Owns the interface. Payloads are sums, or copies, of what groups of nodes have; the messages, and
// whether the nodes called the same, are those of header_exchange.hpp.
#ifndef HSGD_INTERNODE_ROUND_PAYLOAD_HPP_
#define HSGD_INTERNODE_ROUND_PAYLOAD_HPP_

#include <cstddef>
#include <functional>
#include <vector>

namespace hsgd {

// A payload of a node, or of a group of nodes whose payloads have been merged.
struct Payload {
  const std::byte* data = nullptr;
  size_t bytes = 0;
};

// How the payloads of consecutive groups of nodes become one, written to `out`, which is apart from
// all of them. `is_last`: of all nodes. Returns its bytes.
using MergeFn =
    std::function<size_t(const std::vector<Payload>& parts, std::byte* out, bool is_last)>;

// The first step of a pipeline, of which each node is sent what it has to do with. Nothing is
// merged from nodes that called something else, nor from others after one is known.
class RoundPayload {
 public:
  // Before the rounds: from the node that takes no part to its partner.
  static constexpr int kFold = -1;

  virtual ~RoundPayload() = default;
  // Writes what goes to `core` in a round, and returns its bytes.
  virtual size_t write(int round, int core, std::byte* out) = 0;
  // Takes what came: in a round by index in the group, with nothing at this core's own; before the
  // rounds nothing and what the partner sent, or no parts on a core that has none.
  virtual void merge(int round, const std::vector<Payload>& parts) = 0;
};

}  // namespace hsgd

#endif  // HSGD_INTERNODE_ROUND_PAYLOAD_HPP_
