// One node with its ranks as threads: the C interface on random programs, mismatches and
// departures.
#include "support/ranks.hpp"

namespace {

using ranks::Operation;

struct Destroy {
  void operator()(hsgd_comm* comm) const { hsgd_comm_destroy(comm); }
};
using Comm = std::unique_ptr<hsgd_comm, Destroy>;

Comm create(const std::string& path, int rank, int size, const hsgd_options& options) {
  hsgd_comm* comm = nullptr;
  hsgd_error error;
  if (hsgd_comm_create_local(path.c_str(), rank, size, &options, &comm, &error) != HSGD_OK) {
    throw hsgd::Error(static_cast<hsgd_status>(error.code), error.rank, error.message);
  }
  return Comm(comm);
}

int allreduce_doubles(const Comm& comm, std::vector<double>& data, hsgd_error* error,
                      const char* name = nullptr) {
  const hsgd_label label{name, nullptr, 0};
  return hsgd_comm_allreduce(comm.get(), data.data(), data.data(), data.size(), HSGD_FLOAT64,
                             HSGD_SUM, &label, error);
}

void run_operation(const Comm& comm, const Operation& operation, int rank, int size) {
  hsgd_error error;
  std::vector<std::byte> data = ranks::input_of(operation, rank);
  if (operation.kind == Operation::Kind::kBarrier) {
    CHECK_EQ(hsgd_comm_barrier(comm.get(), &error), HSGD_OK);
  } else if (operation.kind == Operation::Kind::kBroadcast) {
    CHECK_EQ(hsgd_comm_broadcast(comm.get(), data.data(), operation.count, operation.dtype,
                                 operation.root, nullptr, &error),
             HSGD_OK);
    CHECK(data == ranks::input_of(operation, operation.root));
  } else {
    std::vector<std::byte> other(operation.bytes());
    std::vector<std::byte>& out = operation.in_place ? data : other;
    CHECK_EQ(hsgd_comm_allreduce(comm.get(), data.data(), out.data(), operation.count,
                                 operation.dtype, operation.op, nullptr, &error),
             HSGD_OK);
    CHECK(out == ranks::expected(operation, ranks::in_a_row({size})));
  }
}

void random_program(int size, uint64_t seed, const hsgd_options& options, int operations) {
  const std::string path = ranks::meeting_point();
  ranks::run(size, [&](int rank) {
    const Comm comm = create(path, rank, size, options);
    std::mt19937_64 program(seed);
    std::mt19937_64 own(seed + static_cast<uint64_t>(rank));
    for (int i = 0; i < operations; ++i) {
      ranks::dawdle(own);
      run_operation(comm, ranks::draw(program, size), rank, size);
    }
    hsgd_counters counters;
    hsgd_comm_counters(comm.get(), &counters);
    CHECK_EQ(counters.calls, static_cast<uint64_t>(operations));
  });
}

// Allreduces on buffers that all ranks share, at drawn offsets; now and then one rank brings
// private memory.
void random_sharing(int size, uint64_t seed, int operations,
                    const hsgd_options& options = ranks::small_steps()) {
  constexpr uint64_t kElements = 50000;
  const std::string path = ranks::meeting_point();
  ranks::run(size, [&](int rank) {
    hsgd_error error;
    hsgd_buffer* buffers[2];
    {
      const Comm comm = create(path, rank, size, options);
      for (hsgd_buffer*& buffer : buffers) {
        CHECK_EQ(hsgd_comm_allocate(comm.get(), kElements, HSGD_FLOAT64, nullptr, &buffer, &error),
                 HSGD_OK);
      }
      std::mt19937_64 program(seed);
      std::mt19937_64 own(seed + static_cast<uint64_t>(rank));
      for (int i = 0; i < operations; ++i) {
        ranks::dawdle(own);
        Operation operation = ranks::draw(program, size);
        operation.kind = Operation::Kind::kAllreduce;
        const bool mixed = program() % 8 == 0 && rank == 0;
        std::vector<std::byte> other(operation.bytes());
        const auto place = [&](hsgd_buffer* buffer) {
          return static_cast<std::byte*>(hsgd_buffer_data(buffer)) + own() % 9 * 8;
        };
        std::byte* in = place(buffers[0]);
        std::byte* out = operation.in_place ? in : mixed ? other.data() : place(buffers[1]);
        const std::vector<std::byte> data = ranks::input_of(operation, rank);
        if (!data.empty()) std::memcpy(in, data.data(), data.size());
        CHECK_EQ(hsgd_comm_allreduce(comm.get(), in, out, operation.count, operation.dtype,
                                     operation.op, nullptr, &error),
                 HSGD_OK);
        const std::vector<std::byte> expected = ranks::expected(operation, ranks::in_a_row({size}));
        CHECK(expected.empty() || std::memcmp(out, expected.data(), expected.size()) == 0);
      }
    }
    for (hsgd_buffer* buffer : buffers) {
      static_cast<char*>(hsgd_buffer_data(buffer))[0] = 1;  // outlives the communicator
      hsgd_buffer_free(buffer);
    }
  });
}

// One of the ranks has another number of elements.
void check_odd_ranks(const hsgd_options& options) {
  for (int size = 2; size <= 5; ++size) {
    for (int odd = 0; odd < size; ++odd) {
      const std::string path = ranks::meeting_point();
      std::vector<std::string> told(static_cast<size_t>(size));
      ranks::run(size, [&](int rank) {
        const Comm comm = create(path, rank, size, options);
        hsgd_error error;
        for (const size_t count : {10, 5000, 100000}) {
          std::vector<double> data(rank == odd ? 17 : count, 1.0);
          CHECK_EQ(allreduce_doubles(comm, data, &error, "grad"), HSGD_ERR_SIGNATURE);
          for (const double value : data) CHECK_EQ(value, 1.0);
          told[static_cast<size_t>(rank)] += error.message;
          std::vector<double> good(count, 1.0);
          CHECK_EQ(allreduce_doubles(comm, good, &error), HSGD_OK);
          for (const double value : good) CHECK_EQ(value, 1.0 * size);
        }
      });
      for (const std::string& text : told) {
        CHECK_EQ(text, told[0]);
        CHECK(text.find("\"grad\"") != std::string::npos);
        CHECK(text.find(hsgd::text("rank %d sent ", odd)) != std::string::npos);
      }
    }
  }
}

}  // namespace

TEST("shared buffers of one to five ranks give the reference, bit for bit") {
  for (int size = 1; size <= 5; ++size) {
    const auto seed = static_cast<uint64_t>(size);
    for (const int cores : {1, size}) {
      const ranks::WithCores pretended(cores);
      random_sharing(size, seed, ranks::kOperations / size / 6);
    }
  }
}

TEST("random programs of one to five ranks give the reference, bit for bit") {
  for (int size = 1; size <= 5; ++size) {
    const auto seed = static_cast<uint64_t>(size);
    for (const int cores : {1, size}) {
      const ranks::WithCores pretended(cores);
      random_program(size, seed, ranks::small_steps(), ranks::kOperations / size / 2);
    }
  }
}

TEST("ranks that are counted in groups give the reference, bit for bit") {
  hsgd_options options = ranks::small_steps();
  options.flat_ranks = 1;
  for (const int size : {3, 4, 5, 7}) {
    for (const int cores : {1, size}) {
      const ranks::WithCores pretended(cores);
      for (const uint32_t slots : {3u, 6u, 7u}) {  // with 7 they look at one another
        options.slots = slots;
        random_program(size, 20 + slots, options, ranks::kOperations / size / 6);
      }
      options.slots = 4;
      random_sharing(size, 30, ranks::kOperations / size / 6, options);
    }
  }
}

TEST("two dozen ranks give the reference, bit for bit") {
  for (const int cores : {2, 24}) {
    const ranks::WithCores pretended(cores);
    random_program(24, 40, ranks::small_steps(), ranks::kCrowdedCalls);
  }
}

TEST("non-temporal stores, long waits and other step sizes change nothing") {
  hsgd_options options = ranks::small_steps();
  options.nontemporal = 1;
  options.spin = 0;
  options.oneshot_bytes = 0;
  options.chunk_bytes = 5000;
  options.slots = 4;
  random_program(3, 11, options, ranks::kOperations / 3);
  options.nontemporal = 2;
  options.oneshot_bytes = 1 << 16;
  options.chunk_bytes = 1 << 16;
  random_program(2, 12, options, ranks::kOperations / 3);
}

TEST("a long run of tiny allreduces keeps payloads of neighbouring calls apart") {
  const std::string path = ranks::meeting_point();
  constexpr int kSize = 3;
  ranks::run(kSize, [&](int rank) {
    const Comm comm = create(path, rank, kSize, ranks::small_steps());
    hsgd_error error;
    for (int i = 0; i < 10 * ranks::kOperations; ++i) {
      std::vector<double> data(static_cast<size_t>(1 + i % 9), i + rank);
      CHECK_EQ(allreduce_doubles(comm, data, &error), HSGD_OK);
      CHECK_EQ(data.back(), 3.0 * i + 3);
    }
  });
}

TEST("ranks that differ are told so alike, keep their data and go on") {
  check_odd_ranks(ranks::small_steps());
}

TEST("ranks that differ are told so alike where they are counted in groups") {
  hsgd_options options = ranks::small_steps();
  options.flat_ranks = 1;
  check_odd_ranks(options);
  const ranks::WithCores pretended(8);
  check_odd_ranks(options);
}

TEST("a rank that leaves is named to those who wait, and their communicator stays broken") {
  const std::string path = ranks::meeting_point();
  ranks::run(3, [&](int rank) {
    Comm comm = create(path, rank, 3, ranks::small_steps());
    hsgd_error error;
    CHECK_EQ(hsgd_comm_barrier(comm.get(), &error), HSGD_OK);
    if (rank == 1) return;
    std::vector<double> data(50000);
    CHECK_EQ(allreduce_doubles(comm, data, &error), HSGD_ERR_PEER_LOST);
    CHECK_EQ(error.rank, 1);
    CHECK(std::strstr(error.message, "rank 1 (pid ") != nullptr);
    CHECK_EQ(hsgd_comm_barrier(comm.get(), &error), HSGD_ERR_PEER_LOST);
  });
}

TEST("a rank that does not come is named when the deadline passes") {
  const std::string path = ranks::meeting_point();
  std::atomic<int> timed_out{0};
  ranks::run(3, [&](int rank) {
    const Comm comm = create(path, rank, 3, ranks::small_steps(0.5));
    hsgd_error error;
    if (rank == 2) {
      while (timed_out < 2) std::this_thread::yield();
      return;
    }
    CHECK_EQ(hsgd_comm_barrier(comm.get(), &error), HSGD_ERR_TIMEOUT);
    CHECK_EQ(error.rank, 2);
    ++timed_out;
  });
}

TEST("wrong arguments are refused one by one") {
  const Comm comm = create(ranks::meeting_point(), 0, 1, ranks::small_steps());
  double data[4] = {};
  hsgd_error error;
  const auto sum = [&](const void* in, void* out, uint64_t count, int dtype, int op) {
    return hsgd_comm_allreduce(comm.get(), in, out, count, static_cast<hsgd_dtype>(dtype),
                               static_cast<hsgd_op>(op), nullptr, &error);
  };
  CHECK_EQ(sum(data, data, 4, 99, HSGD_SUM), HSGD_ERR_ARGUMENT);
  CHECK_EQ(sum(data, data, 4, HSGD_FLOAT64, 99), HSGD_ERR_ARGUMENT);
  CHECK_EQ(sum(data, data, 4, HSGD_INT32, HSGD_MEAN), HSGD_ERR_ARGUMENT);
  CHECK_EQ(sum(nullptr, data, 4, HSGD_FLOAT64, HSGD_SUM), HSGD_ERR_ARGUMENT);
  CHECK_EQ(sum(data, data + 1, 3, HSGD_FLOAT64, HSGD_SUM), HSGD_ERR_ARGUMENT);
  CHECK_EQ(sum(data, data, UINT64_MAX / 8, HSGD_FLOAT64, HSGD_SUM), HSGD_ERR_ARGUMENT);
  CHECK_EQ(sum(nullptr, nullptr, 0, HSGD_FLOAT64, HSGD_SUM), HSGD_OK);
  CHECK_EQ(hsgd_comm_broadcast(comm.get(), data, 4, HSGD_FLOAT64, 1, nullptr, nullptr),
           HSGD_ERR_ARGUMENT);
}

TEST("options that cannot work are refused before memory is taken") {
  const std::vector<std::function<void(hsgd_options&)>> spoilers = {
      [](hsgd_options& o) { o.struct_bytes = 8; },
      [](hsgd_options& o) { o.timeout_s = 0; },
      [](hsgd_options& o) { o.timeout_s = 1e30; },
      [](hsgd_options& o) { o.slots = 2; },
      [](hsgd_options& o) { o.slots = 65; },
      [](hsgd_options& o) { o.chunk_bytes = 0; },
      [](hsgd_options& o) { o.chunk_bytes = uint64_t{1} << 62; },
      [](hsgd_options& o) { o.wire_chunk_bytes = uint64_t{1} << 62; },
      [](hsgd_options& o) { o.oneshot_bytes = uint64_t{1} << 40; },
      [](hsgd_options& o) { o.wire_oneshot_bytes = uint64_t{1} << 40; },
      [](hsgd_options& o) { o.wire_dtype = HSGD_INT32; },
      [](hsgd_options& o) { o.nontemporal = 3; },
  };
  for (const auto& spoil : spoilers) {
    hsgd_options options = ranks::small_steps();
    spoil(options);
    hsgd_comm* comm = nullptr;
    hsgd_error error;
    CHECK_EQ(hsgd_comm_create_local("@unused", 0, 1, &options, &comm, &error), HSGD_ERR_ARGUMENT);
    CHECK(comm == nullptr);
  }
}
