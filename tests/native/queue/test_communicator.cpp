// Several nodes of several ranks, all of them threads, over the in-process transport.
#include <deque>

#include "bindings/c/handles.hpp"
#include "support/cluster.hpp"

namespace {

using ranks::Cluster;
using ranks::kLayouts;
using ranks::Operation;
using ranks::status_of;

// What float32 of an operation travels as: small payloads are sent whole, as they are.
hsgd_dtype narrowed(const Operation& operation, const hsgd_options& options, size_t nodes) {
  if (nodes == 1) return HSGD_FLOAT32;
  const hsgd::RoundSchedule rounds(static_cast<int>(nodes), static_cast<int>(options.wire_radix));
  const auto messages = static_cast<uint64_t>(rounds.messages());
  if (operation.bytes() <= options.wire_oneshot_bytes / messages) return HSGD_FLOAT32;
  if (operation.bytes() <= std::min<uint64_t>(4096, options.wire_oneshot_bytes))
    return HSGD_FLOAT32;
  return static_cast<hsgd_dtype>(options.wire_dtype);
}

void run_operation(hsgd::Communicator& comm, const Operation& operation, int rank,
                   const std::vector<int>& ranks_of_node, const hsgd_options& options) {
  std::vector<std::byte> data = ranks::input_of(operation, rank);
  if (operation.kind == Operation::Kind::kBarrier) {
    comm.barrier();
  } else if (operation.kind == Operation::Kind::kBroadcast) {
    comm.broadcast(data.data(), operation.count, operation.dtype, operation.root, nullptr);
    CHECK(data == ranks::input_of(operation, operation.root));
  } else {
    std::vector<std::byte> other(operation.bytes());
    std::vector<std::byte>& out = operation.in_place ? data : other;
    comm.allreduce(data.data(), out.data(), operation.count, operation.dtype, operation.op,
                   nullptr);
    const hsgd_dtype narrow = narrowed(operation, options, ranks_of_node.size());
    CHECK(out == ranks::expected(operation, ranks::in_a_row(ranks_of_node), narrow,
                                 static_cast<int>(options.wire_radix)));
  }
}

void run_program(const Cluster& cluster, uint64_t seed, int operations) {
  cluster.run([&](int rank, std::unique_ptr<hsgd::Communicator>& comm) {
    std::mt19937_64 program(seed);
    std::mt19937_64 own(seed + static_cast<uint64_t>(rank));
    for (int i = 0; i < operations; ++i) {
      ranks::dawdle(own);
      run_operation(*comm, ranks::draw(program, cluster.size()), rank, cluster.ranks,
                    cluster.options);
    }
  });
}

void random_program(const std::vector<int>& ranks_of_node, uint64_t seed, uint64_t wire_seed,
                    int operations, hsgd_options options = ranks::small_steps()) {
  run_program({ranks_of_node, options, {1, wire_seed, 12}}, seed, operations);
}

void random_sharing(const std::vector<int>& ranks_of_node, uint64_t seed, int operations) {
  const Cluster cluster{ranks_of_node, ranks::small_steps(), {1, seed, 12}};
  cluster.run([&](int rank, std::unique_ptr<hsgd::Communicator>& comm) {
    const auto in = comm->allocate(50000, HSGD_FLOAT64, false, nullptr);
    const auto out = comm->allocate(50000, HSGD_FLOAT64, false, nullptr);
    std::mt19937_64 program(seed);
    for (int i = 0; i < operations; ++i) {
      Operation operation = ranks::draw(program, cluster.size());
      operation.kind = Operation::Kind::kAllreduce;
      const std::vector<std::byte> data = ranks::input_of(operation, rank);
      if (!data.empty()) std::memcpy(in->own(), data.data(), data.size());
      const std::byte* result = operation.in_place ? in->own() : out->own();
      comm->allreduce(in->own(), operation.in_place ? in->own() : out->own(), operation.count,
                      operation.dtype, operation.op, nullptr);
      const std::vector<std::byte> expected =
          ranks::expected(operation, ranks::in_a_row(ranks_of_node));
      CHECK(expected.empty() || std::memcmp(result, expected.data(), expected.size()) == 0);
    }
  });
}

// Allreduces in which each rank draws for each call whether its buffers are shared or private.
void random_mixing(const std::vector<int>& ranks_of_node, uint64_t seed, int operations,
                   const hsgd_options& options) {
  const Cluster cluster{ranks_of_node, options, {1, seed, 12}};
  cluster.run([&](int rank, std::unique_ptr<hsgd::Communicator>& comm) {
    const auto in = comm->allocate(50000, HSGD_FLOAT64, false, nullptr);
    const auto out = comm->allocate(50000, HSGD_FLOAT64, false, nullptr);
    std::mt19937_64 program(seed);
    std::mt19937_64 own(seed + static_cast<uint64_t>(rank));
    for (int i = 0; i < operations; ++i) {
      Operation operation = ranks::draw(program, cluster.size());
      operation.kind = Operation::Kind::kAllreduce;
      std::vector<std::byte> data = ranks::input_of(operation, rank);
      std::vector<std::byte> private_out(operation.bytes());
      const bool shares = own() % 2 == 0;
      if (shares && !data.empty()) std::memcpy(in->own(), data.data(), data.size());
      std::byte* result = shares ? out->own() : private_out.data();
      comm->allreduce(shares ? in->own() : data.data(), result, operation.count, operation.dtype,
                      operation.op, nullptr);
      const std::vector<std::byte> expected =
          ranks::expected(operation, ranks::in_a_row(ranks_of_node), HSGD_FLOAT32,
                          static_cast<int>(options.wire_radix));
      CHECK(expected.empty() || std::memcmp(result, expected.data(), expected.size()) == 0);
    }
  });
}

// Of any kind, while the last local ranks lead, the very last one first.
void random_led_by_the_last(const std::vector<int>& ranks_of_node, uint64_t seed, int operations) {
  Cluster cluster{ranks_of_node, ranks::small_steps(), {1, seed, 12}};
  cluster.let_the_last_lead();
  CHECK(cluster.place(ranks_of_node[0] - 1).lane == 0);
  run_program(cluster, seed, operations);
}

// Broadcasts one after the other, from one root, that take all leaders in many steps, or one in
// one: what one has staged may still be on its way when the next one begins.
void broadcasts_in_a_row(const std::vector<int>& ranks_of_node, uint64_t seed, int operations) {
  hsgd_options options = ranks::small_steps();
  options.wire_radix = 2;
  const Cluster cluster{ranks_of_node, options, {1, seed, 12}};
  cluster.run([&](int rank, std::unique_ptr<hsgd::Communicator>& comm) {
    std::mt19937_64 program(seed);
    const int root = static_cast<int>(seed % 3);
    for (int i = 0; i < operations; ++i) {
      const uint64_t counts[] = {20000, 500, 900, 3000, 100};
      const uint64_t count = counts[program() % 5] + program() % 50;
      std::vector<uint64_t> data(count, rank == root ? seed + static_cast<uint64_t>(i) : 0);
      for (uint64_t k = 0; rank == root && k < count; ++k) data[k] += k * 1000;
      comm->broadcast(data.data(), count, HSGD_INT64, root, nullptr);
      bool right = true;
      for (uint64_t k = 0; k < count; ++k)
        right = right && data[k] == seed + static_cast<uint64_t>(i) + k * 1000;
      CHECK(right);
    }
  });
}

}  // namespace

TEST("ranks that bring shared and private buffers to one allreduce get the reference") {
  uint64_t seed = 500;
  hsgd_options options = ranks::small_steps();
  for (const uint32_t flat_ranks : {16u, 1u}) {
    options.flat_ranks = flat_ranks;
    for (const std::vector<int>& layout : {std::vector<int>{1, 1}, {2, 2}, {3, 1, 2}})
      random_mixing(layout, seed++, ranks::kOperations / 30, options);
  }
  options.wire_radix = 2;  // in rounds
  random_mixing({1, 2, 1, 1, 2, 1, 1, 1, 1}, seed++, ranks::kOperations / 60, options);
}

TEST("broadcasts in a row, of many steps and of few, keep their data apart") {
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    broadcasts_in_a_row({3, 3}, seed, ranks::kOperations / 60);
    broadcasts_in_a_row({3, 2, 2, 2, 2, 2, 2, 2, 2, 2}, seed, ranks::kOperations / 150);
  }
}

TEST("random programs on several nodes give the reference, bit for bit") {
  uint64_t seed = 1;
  for (const auto& layout : kLayouts) random_program(layout, seed++, 0, ranks::kOperations / 15);
}

TEST("shared buffers on several nodes give the reference, bit for bit") {
  uint64_t seed = 50;
  for (const auto& layout : kLayouts) random_sharing(layout, seed++, ranks::kOperations / 30);
}

TEST("nodes that their last ranks lead give the reference, bit for bit") {
  uint64_t seed = 60;
  for (const std::vector<int>& layout : {std::vector<int>{2, 2}, {3, 2, 4}, {2, 1}, {10, 9}}) {
    random_led_by_the_last(layout, seed++, ranks::kOperations / 30);
  }
}

TEST("ranks that are counted in groups on several nodes give the reference, bit for bit") {
  hsgd_options options = ranks::small_steps();
  options.flat_ranks = 1;
  uint64_t seed = 70;
  for (const std::vector<int>& layout : {std::vector<int>{3, 4}, {5, 1, 3}, {4, 4, 4}}) {
    random_program(layout, seed++, 0, ranks::kOperations / 30, options);
  }
}

TEST("ranks of one node that know of two limits from before give the reference, bit for bit") {
  hsgd_options options = ranks::small_steps();
  options.known_store = 1;
  options.oneshot_bytes = 4096;
  options.known_allreduce_bytes = 256;
  uint64_t seed = 80;
  for (const uint32_t flat_ranks : {16u, 1u}) {
    options.flat_ranks = flat_ranks;
    for (const int size : {2, 4}) {
      const Cluster cluster{{size}, options, {1, seed, 12}};
      run_program(cluster, seed++, ranks::kOperations / 30);
      cluster.run([&](int, std::unique_ptr<hsgd::Communicator>& comm) {
        CHECK_EQ(comm->topology().oneshot_bytes, uint64_t{4096});
        CHECK_EQ(comm->topology().allreduce_bytes, uint64_t{256});
      });
    }
  }
}

TEST("late messages that overtake those of other channels change nothing") {
  uint64_t seed = 100;
  for (const auto& layout : kLayouts) {
    random_program(layout, seed, seed + 1, ranks::kOperations / 15);
    ++seed;
  }
}

TEST("16-bit floats between nodes give the reference that rounds at each level, bit for bit") {
  for (const hsgd_dtype narrow : {HSGD_BFLOAT16, HSGD_FLOAT16}) {
    hsgd_options options = ranks::small_steps();
    options.wire_dtype = narrow;
    uint64_t seed = 200 + static_cast<uint64_t>(narrow);
    for (const auto& layout : kLayouts) {
      random_program(layout, seed, seed + 1, ranks::kOperations / 20, options);
      seed += 10;
    }
  }
}

TEST("16-bit floats in several rounds give the reference that rounds at each level, bit for bit") {
  uint64_t seed = 500;
  for (const hsgd_dtype narrow : {HSGD_BFLOAT16, HSGD_FLOAT16}) {
    for (const std::vector<int>& layout : {std::vector<int>{1, 2, 1}, {1, 1, 1, 1, 1, 1}}) {
      hsgd_options options = ranks::small_steps();
      options.wire_dtype = narrow;
      options.wire_radix = 2;
      random_program(layout, seed, seed + 1, ranks::kOperations / 30, options);
      seed += 10;
    }
  }
}

TEST("the step size chosen for the cluster gives the reference, with one leader or all") {
  hsgd_options options = ranks::small_steps();
  options.wire_chunk_bytes = 0;
  for (const auto& layout : kLayouts) random_program(layout, 300, 7, 40, options);
}

TEST("every step size and number of slots gives the same result") {
  hsgd_options options = ranks::small_steps();
  for (const uint32_t slots : {3u, 4u, 7u}) {
    for (const uint64_t chunk_bytes : {4096u, 12345u, 65536u}) {
      options.slots = slots;
      options.wire_chunk_bytes = chunk_bytes;
      options.wire_oneshot_bytes = chunk_bytes == 12345u ? 0 : 100;
      random_program({2, 2, 1}, slots + chunk_bytes, 5, ranks::kOperations / 60, options);
    }
  }
}

TEST("ranks that differ, within a node or between nodes, are told so alike and go on") {
  std::vector<Cluster> clusters;
  for (const auto& layout : kLayouts) clusters.push_back({layout, ranks::small_steps(), {1, 3, 6}});
  clusters.push_back(clusters.back());
  clusters.back().options.wire_radix = 2;  // in rounds, and with a node that takes no part in them
  for (const Cluster& cluster : clusters) {
    for (int odd = 0; odd < cluster.size(); ++odd) {
      std::vector<std::string> told(static_cast<size_t>(cluster.size()));
      cluster.run([&](int rank, std::unique_ptr<hsgd::Communicator>& comm) {
        for (const size_t count : {10, 20000}) {
          for (const size_t other : {17, 9000}) {
            std::vector<double> data(rank == odd ? other : count, 1.0);
            std::string message;
            CHECK_EQ(status_of(
                         [&] {
                           comm->allreduce(data.data(), data.data(), data.size(), HSGD_FLOAT64,
                                           HSGD_SUM, nullptr);
                         },
                         &message),
                     HSGD_ERR_SIGNATURE);
            for (const double value : data) CHECK_EQ(value, 1.0);
            told[static_cast<size_t>(rank)] += message;
            std::vector<double> good(count, 1.0);
            comm->allreduce(good.data(), good.data(), count, HSGD_FLOAT64, HSGD_SUM, nullptr);
            for (const double value : good) CHECK_EQ(value, 1.0 * cluster.size());
          }
        }
      });
      for (const std::string& text : told) CHECK_EQ(text, told[0]);
      CHECK(told[0].find(hsgd::text("rank %d sent ", odd)) != std::string::npos);
    }
  }
}

namespace {

// A large collective of each kind, a small one and one without data, by number.
void call_one(hsgd::Communicator& comm, int kind, std::vector<double>& in,
              std::vector<double>& out) {
  const auto size = static_cast<size_t>(comm.topology().size);
  const std::vector<uint64_t> blocks(size, in.size() / size);
  switch (kind) {
    case 0:
      return comm.allreduce(in.data(), out.data(), in.size(), HSGD_FLOAT64, HSGD_SUM, nullptr);
    case 1:
      return comm.reduce_scatter(in.data(), out.data(), blocks.data(), HSGD_FLOAT64, HSGD_SUM,
                                 nullptr);
    case 2:
      return comm.allgather(in.data(), out.data(), blocks.data(), HSGD_FLOAT64, nullptr);
    case 3:
      return comm.broadcast(out.data(), out.size(), HSGD_FLOAT64, 0, nullptr);
    case 4:
      return comm.allreduce(in.data(), out.data(), 3, HSGD_FLOAT64, HSGD_SUM, nullptr);
    default:
      return comm.barrier();
  }
}

}  // namespace

TEST("a node that calls another collective is told so as all are, and no output is touched") {
  for (const int nodes : {2, 3, 5, 16, 17}) {
    const Cluster cluster{std::vector<int>(static_cast<size_t>(nodes), nodes < 4 ? 2 : 1),
                          ranks::small_steps(),
                          {1, 5, 6}};
    cluster.run([&](int rank, std::unique_ptr<hsgd::Communicator>& comm) {
      const int odd = cluster.size() / 2;
      const std::vector<double> before(static_cast<size_t>(cluster.size()) * 90, 2.0);
      for (int usual = 0; usual < 6; ++usual) {
        for (int other = 0; other < 6; ++other) {
          if (usual == other) continue;
          std::vector<double> in(before.size(), 1.0);
          std::vector<double> out = before;
          const int kind = rank == odd ? other : usual;
          CHECK_EQ(status_of([&] { call_one(*comm, kind, in, out); }), HSGD_ERR_SIGNATURE);
          CHECK(out == before);
          call_one(*comm, 0, in, out);
          CHECK(out == std::vector<double>(in.size(), 1.0 * cluster.size()));
        }
      }
    });
  }
}

namespace {

struct Destroy {
  void operator()(hsgd_comm* comm) const { hsgd_comm_destroy(comm); }
};

hsgd_call sum_of(std::vector<double>& data) {
  hsgd_call call{};
  call.kind = HSGD_ALLREDUCE;
  call.in = call.out = data.data();
  call.count = data.size();
  call.dtype = HSGD_FLOAT64;
  call.op = HSGD_SUM;
  return call;
}

}  // namespace

TEST("asynchronous and blocking calls between nodes are executed in order") {
  for (const auto& layout : kLayouts) {
    const Cluster cluster{layout, ranks::small_steps(), {1, 9, 12}};
    cluster.run([&](int rank, std::unique_ptr<hsgd::Communicator>& communicator) {
      const std::unique_ptr<hsgd_comm, Destroy> comm(hsgd::new_comm(std::move(communicator)));
      std::mt19937_64 program(3);
      std::deque<std::vector<double>> data;
      std::deque<hsgd_request*> requests;
      hsgd_error error;
      for (int i = 0; i < ranks::kOperations / 30; ++i) {
        data.emplace_back(1 + program() % 3000, rank + i);
        const hsgd_call call = sum_of(data.back());
        if (program() % 5 == 0) {
          CHECK_EQ(hsgd_comm_run(comm.get(), &call, &error), HSGD_OK);
        } else {
          requests.push_back(nullptr);
          if (!CHECK_EQ(hsgd_comm_start(comm.get(), &call, &requests.back(), &error), HSGD_OK))
            return;
        }
      }
      while (!requests.empty()) {
        CHECK_EQ(hsgd_request_wait(requests.back(), requests.size() % 2 == 0 ? -1 : 60, &error),
                 HSGD_OK);
        hsgd_request_free(requests.back());
        requests.pop_back();
      }
      const int size = cluster.size();
      for (size_t i = 0; i < data.size(); ++i) {
        CHECK_EQ(data[i].back(), size * (size - 1) / 2.0 + size * static_cast<double>(i));
      }
    });
  }
}

TEST("where a transport serves one thread only, all ranks refuse asynchronous calls alike") {
  Cluster cluster{{2, 1}, ranks::small_steps(), {}};
  cluster.one_thread = "this network is for one thread";
  cluster.run([&](int, std::unique_ptr<hsgd::Communicator>& communicator) {
    const std::unique_ptr<hsgd_comm, Destroy> comm(hsgd::new_comm(std::move(communicator)));
    std::vector<double> data(1000, 1.0);
    const hsgd_call call = sum_of(data);
    hsgd_request* request = nullptr;
    hsgd_error error;
    CHECK_EQ(hsgd_comm_start(comm.get(), &call, &request, &error), HSGD_ERR_SYSTEM);
    CHECK(std::strstr(error.message, "between nodes: this network is for one thread") != nullptr);
    CHECK(request == nullptr);
    CHECK_EQ(hsgd_comm_run(comm.get(), &call, &error), HSGD_OK);
    CHECK_EQ(data[0], 3.0);
  });
}

TEST("a node sends 2 (N - 1) / N of the bytes, whatever its number of ranks") {
  for (const auto& layout : kLayouts) {
    hsgd_options options = ranks::small_steps();
    options.wire_chunk_bytes = 1 << 17;
    const Cluster cluster{layout, options, {}};
    std::vector<std::atomic<uint64_t>> sent(layout.size());
    constexpr uint64_t kCount = 1 << 19;
    cluster.run([&](int rank, std::unique_ptr<hsgd::Communicator>& comm) {
      std::vector<float> data(kCount, 1.0f);
      comm->allreduce(data.data(), data.data(), kCount, HSGD_FLOAT32, HSGD_SUM, nullptr);
      const auto node = static_cast<size_t>(cluster.place(rank).node_rank);
      sent[node] += comm->counters().inter_bytes_sent;
    });
    const double nodes = static_cast<double>(layout.size());
    const double least = 2 * (nodes - 1) / nodes * kCount * sizeof(float);
    for (const auto& bytes : sent) {
      CHECK(static_cast<double>(bytes) > 0.99 * least);
      CHECK(static_cast<double>(bytes) < 1.01 * least);
    }
  }
}

TEST("leaders record when they were busy between nodes, and nobody where nobody asks") {
  const Cluster cluster{{2, 1}, ranks::small_steps(), {}};
  cluster.run([&](int rank, std::unique_ptr<hsgd::Communicator>& comm) {
    hsgd_record records[4] = {};
    for (const uint64_t count : {uint64_t{4}, uint64_t{1} << 16}) {
      std::vector<float> data(count, 1.0f);
      comm->recorder().keep(0);
      comm->allreduce(data.data(), data.data(), count, HSGD_FLOAT32, HSGD_SUM, nullptr);
      CHECK_EQ(comm->recorder().take(records, 4), 0u);
      comm->recorder().keep(4);
      comm->allreduce(data.data(), data.data(), count, HSGD_FLOAT32, HSGD_SUM, nullptr);
      CHECK_EQ(comm->recorder().take(records, 4), 1u);
      CHECK_EQ(records[0].bytes, count * sizeof(float));
      const hsgd_span& inter = records[0].inter;
      CHECK_EQ(inter.begin_ns > 0, cluster.place(rank).local_rank == 0);
      CHECK(inter.begin_ns == 0 || inter.begin_ns >= records[0].call.begin_ns);
      CHECK(inter.end_ns <= records[0].call.end_ns);
    }
  });
}

TEST("16-bit floats halve what float32 sends between nodes, and nothing else") {
  hsgd_options options = ranks::small_steps();
  options.wire_dtype = HSGD_BFLOAT16;
  options.wire_chunk_bytes = 1 << 17;
  const Cluster cluster{{2, 2}, options, {}};
  for (const hsgd_dtype dtype : {HSGD_FLOAT32, HSGD_INT32}) {
    std::atomic<uint64_t> sent{0};
    constexpr uint64_t kCount = 1 << 19;
    cluster.run([&](int rank, std::unique_ptr<hsgd::Communicator>& comm) {
      std::vector<int32_t> data(kCount, 0);
      comm->allreduce(data.data(), data.data(), kCount, dtype, HSGD_SUM, nullptr);
      if (cluster.place(rank).node_rank == 0) sent += comm->counters().inter_bytes_sent;
    });
    const double least = static_cast<double>(kCount) * (dtype == HSGD_FLOAT32 ? 2 : 4);
    CHECK(static_cast<double>(sent) > 0.99 * least);
    CHECK(static_cast<double>(sent) < 1.01 * least);
  }
}
