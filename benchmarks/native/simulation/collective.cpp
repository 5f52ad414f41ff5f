// Communicators with one rank per node, and SMPI's functions.
#include "collective.hpp"

#include <mpi.h>
#include <unistd.h>

#include <numeric>
#include <utility>
#include <vector>

#include "collectives/queue/communicator.hpp"
#include "core/base/error.hpp"
#include "network/mpi/transport.hpp"

namespace simulation {
namespace {

int rank_here() {
  int rank = 0;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

int size_of_world() {
  int size = 1;
  PMPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

hsgd_options options_with(int radix) {
  hsgd_options options;
  hsgd_options_default(&options);
  options.wire_radix = static_cast<uint32_t>(radix);
  options.spin = 0;         // a simulated rank that waits gives way at once
  options.nontemporal = 0;  // nothing is measured at start-up
  options.known_store = 1;
  return options;
}

class HsgdCollectives final : public Collectives {
 public:
  explicit HsgdCollectives(int radix) {
    const int rank = rank_here();
    const int size = size_of_world();
    std::vector<int> node_of_rank(static_cast<size_t>(size));
    std::iota(node_of_rank.begin(), node_of_rank.end(), 0);
    hsgd::Place place = hsgd::place_on(std::move(node_of_rank), rank);
    MPI_Comm comm = MPI_COMM_NULL;
    PMPI_Comm_dup(MPI_COMM_WORLD, &comm);
    hsgd::Line line{std::make_shared<hsgd::OwnComm>(comm), place.node_of_rank, rank};
    const std::string path =
        hsgd::text("@hsgd-simulation-%d-%d", static_cast<int>(::getpid()), rank);
    counts_.assign(static_cast<size_t>(size), 0);
    comm_ = std::make_unique<hsgd::Communicator>(path, nullptr, std::move(place),
                                                 hsgd::make_mpi_transport(std::move(line), nullptr),
                                                 options_with(radix));
  }
  // The simulation ends with the measurement: closing, N - 1 messages of each rank, is not part of
  // it, and a thousand ranks would take minutes for it.
  ~HsgdCollectives() override { static_cast<void>(comm_.release()); }

  void allreduce(const Vectors& vectors) override {
    comm_->allreduce(vectors.in, vectors.out, vectors.count, HSGD_FLOAT32, HSGD_SUM, nullptr);
  }
  void allgather(const Vectors& vectors) override {
    comm_->allgather(vectors.in, vectors.out, blocks_of(vectors), HSGD_FLOAT32, nullptr);
  }
  void reduce_scatter(const Vectors& vectors) override {
    comm_->reduce_scatter(vectors.in, vectors.out, blocks_of(vectors), HSGD_FLOAT32, HSGD_SUM,
                          nullptr);
  }
  void alltoall(const Vectors& vectors) override {
    const uint64_t* blocks = blocks_of(vectors);
    comm_->alltoall(vectors.in, blocks, vectors.out, blocks, HSGD_FLOAT32, nullptr);
  }
  void broadcast(const Vectors& vectors) override {
    comm_->broadcast(vectors.out, vectors.count, HSGD_FLOAT32, 0, nullptr);
  }
  void barrier() override { comm_->barrier(); }

 private:
  const uint64_t* blocks_of(const Vectors& vectors) {
    counts_.assign(counts_.size(), vectors.count / counts_.size());
    return counts_.data();
  }

  std::unique_ptr<hsgd::Communicator> comm_;
  std::vector<uint64_t> counts_;
};

class MpiCollectives final : public Collectives {
 public:
  void allreduce(const Vectors& vectors) override {
    PMPI_Allreduce(vectors.in, vectors.out, whole(vectors), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  }
  void allgather(const Vectors& vectors) override {
    PMPI_Allgather(vectors.in, block(vectors), MPI_FLOAT, vectors.out, block(vectors), MPI_FLOAT,
                   MPI_COMM_WORLD);
  }
  void reduce_scatter(const Vectors& vectors) override {
    PMPI_Reduce_scatter_block(vectors.in, vectors.out, block(vectors), MPI_FLOAT, MPI_SUM,
                              MPI_COMM_WORLD);
  }
  void alltoall(const Vectors& vectors) override {
    PMPI_Alltoall(vectors.in, block(vectors), MPI_FLOAT, vectors.out, block(vectors), MPI_FLOAT,
                  MPI_COMM_WORLD);
  }
  void broadcast(const Vectors& vectors) override {
    PMPI_Bcast(vectors.out, whole(vectors), MPI_FLOAT, 0, MPI_COMM_WORLD);
  }
  void barrier() override { PMPI_Barrier(MPI_COMM_WORLD); }

 private:
  int whole(const Vectors& vectors) const { return static_cast<int>(vectors.count); }
  int block(const Vectors& vectors) const { return whole(vectors) / size_; }

  const int size_ = size_of_world();
};

struct Named {
  const char* name;
  void (*run)(Collectives& collectives, const Vectors& vectors);
};

constexpr Named kNamed[] = {
    {"allreduce", [](Collectives& all, const Vectors& vectors) { all.allreduce(vectors); }},
    {"allgather", [](Collectives& all, const Vectors& vectors) { all.allgather(vectors); }},
    {"reduce_scatter",
     [](Collectives& all, const Vectors& vectors) { all.reduce_scatter(vectors); }},
    {"alltoall", [](Collectives& all, const Vectors& vectors) { all.alltoall(vectors); }},
    {"broadcast", [](Collectives& all, const Vectors& vectors) { all.broadcast(vectors); }},
    {"barrier", [](Collectives& all, const Vectors&) { all.barrier(); }},
};

const Named* named(const std::string& name) {
  for (const Named& one : kNamed) {
    if (name == one.name) return &one;
  }
  return nullptr;
}

}  // namespace

bool is_collective(const std::string& name) { return named(name) != nullptr; }

bool run_collective(Collectives& collectives, const std::string& name, const Vectors& vectors) {
  const Named* one = named(name);
  if (one != nullptr) one->run(collectives, vectors);
  return one != nullptr;
}

std::unique_ptr<Collectives> make_hsgd_collectives(int radix) {
  return std::make_unique<HsgdCollectives>(radix);
}

std::unique_ptr<Collectives> make_mpi_collectives() { return std::make_unique<MpiCollectives>(); }

}  // namespace simulation
