// Box: a parameter box inside a node: float32 values in shared memory that processes read, write
// and add to at any time, without a server.
//
// Owns the segment and the counters, and works chunk by chunk. Reads take no lock and are
// consistent per chunk: they return the values of a chunk after a number of complete changes. A
// change (write, accumulate, elastic) is complete and exclusive per chunk, also if the process dies
// half-way: its finished chunks are changed, the others are not. The chunks of two concurrent
// changes have no common order. No values are copied for a reader. Source: the Soft Memory Box of
// ShmCaffe (Ahn et al., ICDCS 2018); the way that chunks change is our own.
#ifndef HSGD_ONESIDED_BOX_BOX_HPP_
#define HSGD_ONESIDED_BOX_BOX_HPP_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/kernels/elastic_kernels.hpp"
#include "core/kernels/reduce.hpp"
#include "core/os/fork_guard.hpp"
#include "core/os/shared_memory.hpp"
#include "core/os/wait.hpp"
#include "hsgd_core.h"
#include "onesided/box/chunks.hpp"
#include "onesided/box/key_registry.hpp"
#include "onesided/box/layout.hpp"

namespace hsgd {

class HSGD_API Box {
 public:
  // Creates a box on this rank alone. `initial` has plan.count values; nullptr: zeros. Throws
  // HSGD_ERR_ARGUMENT if the key is taken or the plan cannot work, HSGD_ERR_MEMORY.
  static std::unique_ptr<Box> create(const std::string& key, const BoxPlan& plan,
                                     const float* initial);
  // Attaches to a box; blocks until a process holds it, up to the deadline.
  static std::unique_ptr<Box> attach(const std::string& key, const Deadline& deadline);

  ~Box();
  // Returns a deadline for the functions below. Throws HSGD_ERR_ARGUMENT.
  static Deadline patience(double timeout_s, Deadline::Interrupted interrupted);

  const BoxPlan& plan() const { return plan_; }
  bool is_mine() const { return owner_.is_this_process(); }
  // Returns the number of finished changes, over all holders.
  uint64_t version() const;
  uint64_t recoveries() const;

  // All of these copy or combine values [offset, offset + count), check the range, and throw
  // HSGD_ERR_TIMEOUT, naming the holder of a lock that they did not get in time; finished chunks
  // stay changed.
  void read(float* out, uint64_t offset, uint64_t count, const Deadline& deadline) const;
  // Returns the version after this write. `finishes`: it counts as a change; false for a part of
  // one.
  uint64_t write(const float* values, uint64_t offset, uint64_t count, bool finishes,
                 const Deadline& deadline);
  // Adds float32 or bfloat16. `sums`: receives the `count` new values; may be nullptr.
  uint64_t accumulate(const void* delta, hsgd_dtype dtype, uint64_t offset, uint64_t count,
                      float* sums, bool finishes, const Deadline& deadline);
  // Updates a box that copies another node's: stores its values as of `stamp` and `version`, except
  // in chunks that already have later ones.
  void take_copy(const float* values, uint64_t offset, uint64_t count, uint64_t stamp,
                 uint64_t version, const Deadline& deadline);
  void check_range(const char* what, uint64_t offset, uint64_t count) const;

  // Mixes tensor after tensor from the beginning of the box: see core/kernels/elastic_kernels.hpp.
  // `delta` is an array of float32 or bfloat16 for all of them; if nullptr, the difference is
  // pushed into the box in the same pass. Returns the sum of squares of weights - centre.
  struct Tensor {
    float* data;
    uint64_t count;
  };
  double elastic(const std::vector<Tensor>& weights, float rate, void* delta, hsgd_dtype dtype,
                 const Deadline& deadline);

  // Adds to a counter and returns its previous value.
  int64_t fetch_add(uint32_t counter, int64_t value);

 private:
  using Part = BoxChunks::Part;

  Box(Segment segment, Fd door, const BoxPlan& plan);

  void check_mine() const;
  BoxHeader& header() const { return *reinterpret_cast<BoxHeader*>(segment_.data()); }
  template <class Work>
  void change(uint64_t offset, uint64_t count, const Deadline& deadline, Work&& work);
  void replace(const Part& part, uint32_t journal, const float* values);
  uint64_t finish_change(bool finishes);
  double mix(const std::vector<Tensor>& weights, const std::vector<uint64_t>& starts,
             const Part& part, ElasticArgs args, void* delta, hsgd_dtype dtype) const;

  BoxPlan plan_;
  Owner owner_;
  Segment segment_;
  uint64_t place_ = 0;  // number of this holder among all that ever attached
  Store store_;
  BoxChunks chunks_;
  CopyFn copy_;
  AddFn add_;
  ConvertFn widen_;
  ElasticFn elastic_;
  BoxDoor door_;
};

}  // namespace hsgd

#endif  // HSGD_ONESIDED_BOX_BOX_HPP_
