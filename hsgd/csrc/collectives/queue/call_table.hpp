// check_call() and execute_call(): run the collectives of the C interface, one hsgd_call each.
//
// Also implements the kinds that consist of two collectives: ranks that know only their own rows
// first exchange their counts. Blocking and submitted calls run the same code.
#ifndef HSGD_COLLECTIVES_QUEUE_CALL_TABLE_HPP_
#define HSGD_COLLECTIVES_QUEUE_CALL_TABLE_HPP_

#include "collectives/queue/communicator.hpp"
#include "hsgd_core.h"

namespace hsgd {

// Checks a call on this rank alone. Throws HSGD_ERR_ARGUMENT.
void check_call(const Communicator& communicator, const hsgd_call& call);
// Executes a checked call with all ranks; blocks.
void execute_call(Communicator& communicator, const hsgd_call& call);

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_QUEUE_CALL_TABLE_HPP_
