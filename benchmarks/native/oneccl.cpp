/* oneCCL's collectives for CPUs behind three functions in C, for native/oneccl.c.
 *
 * Owns the communicator of oneCCL. Its headers and library are not here: peers.py fetches them and
 * links them into one library with this file.
 */
#include <exception>
#include <memory>
#include <oneapi/ccl.hpp>

#include "worker.h"

namespace {

std::unique_ptr<ccl::communicator> communicator;

void connect(const Bench& b) {
  ccl::init();
  std::shared_ptr<ccl::kvs> store;
  ccl::kvs::address_type address;
  if (b.rank == 0) {
    store = ccl::create_main_kvs();
    address = store->get_address();
  }
  PMPI_Bcast(address.data(), static_cast<int>(address.size()), MPI_BYTE, 0, b.world);
  if (b.rank != 0) store = ccl::create_kvs(address);
  communicator =
      std::make_unique<ccl::communicator>(ccl::create_communicator(b.size, b.rank, store));
}

ccl::event begin(const Buffers& use, int k) {
  constexpr auto kFloat = ccl::datatype::float32;
  constexpr auto kSum = ccl::reduction::sum;
  const float* in = use.in[k];
  float* out = use.out[k];
  const ccl::communicator& all = *communicator;
  switch (use.collective) {
    case kAllreduce:
      return ccl::allreduce(in, out, use.count_in, kFloat, kSum, all);
    case kBroadcast:
      return ccl::broadcast(out, use.count_out, kFloat, 0, all);
    case kAllgather:
      return ccl::allgather(in, out, use.count_in, kFloat, all);
    case kReduceScatter:
      return ccl::reduce_scatter(in, out, use.count_out, kFloat, kSum, all);
    case kAlltoall:
      return ccl::alltoall(in, out, use.count_in / all.size(), kFloat, all);
    default:
      return ccl::barrier(all);
  }
}

template <typename Action>
int guarded(Bench* b, Action action) {
  try {
    action();
    return 0;
  } catch (const std::exception& error) {
    snprintf(b->why, sizeof b->why, "%s", error.what());
    return 1;
  }
}

}  // namespace

extern "C" {

/* Collective. Writes the version as a fact. */
int peer_start(Bench* b, FILE* facts) {
  return guarded(b, [b, facts] {
    connect(*b);
    fprintf(facts, "\"oneccl\": \"%s\"", ccl::get_library_version().full);
  });
}

/* Collective; returns when pair k of b->use is done. */
int peer_call(Bench* b, int k) {
  return guarded(b, [b, k] { begin(b->use, k).wait(); });
}

/* Collective. */
void peer_stop() { communicator.reset(); }
}
