// The collectives: each is a function, in a file of its own, that all ranks call alike.
//
// Each chooses between its forms by size and by where the arguments lie (one-shot, in place, chunk
// pipeline), the same on all ranks. Collective over all ranks of the context, of which there are at
// least two; blocking. All throw what waiting throws (context/context.hpp), and MismatchError when
// ranks called different things, before any data has moved.
#ifndef HSGD_COLLECTIVES_COLLECTIVES_HPP_
#define HSGD_COLLECTIVES_COLLECTIVES_HPP_

#include <string>

#include "context/context.hpp"

namespace hsgd {

void run_allreduce(Context& context, const Operation& operation);
void run_broadcast(Context& context, const Operation& operation);
void run_reduce_scatter(Context& context, const Operation& operation);
void run_allgather(Context& context, const Operation& operation);
void run_alltoall(Context& context, const Operation& operation);

// Throws what ranks that disagree about one count are told. `call` begins the text.
[[noreturn]] void fail_counts(const std::string& call, const hsgd_label* label, int from,
                              uint64_t sent, int to, uint64_t expected, hsgd_dtype dtype);

// An allreduce of the ranks of this node alone, with the tuning at hand; for measuring.
void allreduce_on_node(Context& context, const Operation& operation);

// All of an allgather but its arguments.
Operation allgather_operation(const Context& context, const uint64_t* counts, hsgd_dtype dtype,
                              const hsgd_label* label);

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_COLLECTIVES_HPP_
