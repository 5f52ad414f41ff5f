// autotune(): measures which sizes and stores are fastest inside the node.
//
// Runs the real collectives for some milliseconds. The answer depends on the machine, and on a
// virtual machine even on the hour (whether cores share a cache).
#ifndef HSGD_COLLECTIVES_QUEUE_AUTOTUNE_HPP_
#define HSGD_COLLECTIVES_QUEUE_AUTOTUNE_HPP_

#include "collectives/context/context.hpp"

namespace hsgd {

// Measures and ends the set-up of the context. All ranks must call it.
void autotune(Context& context);

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_QUEUE_AUTOTUNE_HPP_
