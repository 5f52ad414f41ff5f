// Collectives as the C interface describes them: one hsgd_call each.
//
// Owns the kinds that are made of others: how ranks that know only their own rows tell one another
// first. The same for calls that are made now and for those that are submitted.
#ifndef HSGD_COLLECTIVES_QUEUE_CALL_TABLE_HPP_
#define HSGD_COLLECTIVES_QUEUE_CALL_TABLE_HPP_

#include "collectives/queue/communicator.hpp"
#include "hsgd_core.h"

namespace hsgd {

// Local. Throws HSGD_ERR_ARGUMENT.
void check_call(const Communicator& communicator, const hsgd_call& call);
// Collective, blocking; of a call that was checked.
void execute_call(Communicator& communicator, const hsgd_call& call);

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_QUEUE_CALL_TABLE_HPP_
