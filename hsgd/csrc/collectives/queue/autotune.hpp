// The start-up measurement: which sizes and stores are fastest inside the node.
//
// Owns how that is measured: with the collectives themselves, in some milliseconds. What is faster
// depends on the machine, and on one virtual machine even on the hour (whether cores share a
// cache).
#ifndef HSGD_COLLECTIVES_QUEUE_AUTOTUNE_HPP_
#define HSGD_COLLECTIVES_QUEUE_AUTOTUNE_HPP_

#include "collectives/context/context.hpp"

namespace hsgd {

// Collective; ends the set-up of the context.
void autotune(Context& context);

}  // namespace hsgd

#endif  // HSGD_COLLECTIVES_QUEUE_AUTOTUNE_HPP_
