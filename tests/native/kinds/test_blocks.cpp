// Collectives whose ranks have different parts, on one node and several, all ranks threads.
#include <numeric>

#include "support/cluster.hpp"

namespace {

using ranks::Cluster;
using ranks::Operation;
using ranks::status_of;

// One call of a random program, the same on all ranks.
struct Call {
  enum class Kind { kReduceScatter, kAllgather, kAlltoall, kAllreduce, kBroadcast } kind;
  Operation operation;           // dtype, op, seed, in place; count: of all blocks
  std::vector<uint64_t> counts;  // of the block of each rank; alltoall: row by row
};

using Bytes = std::vector<std::byte>;

// Blocks of very different sizes, and empty ones.
std::vector<uint64_t> draw_counts(std::mt19937_64& program, size_t blocks, uint64_t most) {
  std::vector<uint64_t> counts(blocks);
  const bool even = program() % 3 == 0;
  const uint64_t first = program() % most;
  for (uint64_t& count : counts) {
    count = even ? first : program() % 4 == 0 ? 0 : program() % (program() % most + 1);
  }
  return counts;
}

Call draw(std::mt19937_64& program, int size) {
  constexpr uint64_t kMost[] = {2, 40, 300, 5000, 60000};
  Call call;
  call.kind = static_cast<Call::Kind>(program() % 5);
  const auto ranks = static_cast<size_t>(size);
  const bool square = call.kind == Call::Kind::kAlltoall;
  const uint64_t most = kMost[program() % 5] / (square ? ranks : 1) + 2;
  call.counts = draw_counts(program, square ? ranks * ranks : ranks, most);
  call.operation = ranks::draw(program, size);
  call.operation.count = std::accumulate(call.counts.begin(), call.counts.end(), uint64_t{0});
  return call;
}

uint64_t sum(const std::vector<uint64_t>& counts, int begin, int end) {
  return std::accumulate(counts.begin() + begin, counts.begin() + end, uint64_t{0});
}

Bytes part_of(const Bytes& whole, uint64_t begin, uint64_t count, size_t size) {
  const auto first = whole.begin() + static_cast<std::ptrdiff_t>(begin * size);
  return Bytes(first, first + static_cast<std::ptrdiff_t>(count * size));
}

void run_reduce_scatter(hsgd::Communicator& comm, const Call& call, int rank,
                        const Cluster& cluster) {
  const Operation& operation = call.operation;
  const size_t size = hsgd_dtype_bytes(operation.dtype);
  const uint64_t begin = sum(call.counts, 0, rank);
  const uint64_t count = call.counts[static_cast<size_t>(rank)];
  Bytes in = ranks::input_of(operation, rank);
  Bytes own(count * size);
  std::byte* out = operation.in_place ? in.data() + begin * size : own.data();
  comm.reduce_scatter(in.data(), out, call.counts.data(), operation.dtype, operation.op, nullptr);
  const Bytes wanted = part_of(cluster.expected(operation), begin, count, size);
  CHECK(Bytes(out, out + count * size) == wanted);
  if (operation.in_place) return;
  CHECK(in == ranks::input_of(operation, rank));
}

void run_allgather(hsgd::Communicator& comm, const Call& call, int rank) {
  const size_t size = hsgd_dtype_bytes(call.operation.dtype);
  Bytes wanted;
  Bytes own;
  for (size_t other = 0; other < call.counts.size(); ++other) {
    Operation operation = call.operation;
    operation.count = call.counts[other];
    const Bytes block = ranks::input_of(operation, static_cast<int>(other));
    wanted.insert(wanted.end(), block.begin(), block.end());
    if (static_cast<int>(other) == rank) own = block;
  }
  Bytes out(wanted.size());
  std::byte* in = own.data();
  if (call.operation.in_place) {
    in = out.data() + sum(call.counts, 0, rank) * size;
    if (!own.empty()) std::memcpy(in, own.data(), own.size());
  }
  comm.allgather(in, out.data(), call.counts.data(), call.operation.dtype, nullptr);
  CHECK(out == wanted);
}

void run_alltoall(hsgd::Communicator& comm, const Call& call, int rank, int ranks) {
  const auto count_of = [&](int from, int to) {
    return call
        .counts[static_cast<size_t>(from) * static_cast<size_t>(ranks) + static_cast<size_t>(to)];
  };
  const auto block_of = [&](int from, int to) {
    Operation operation = call.operation;
    operation.count = count_of(from, to);
    return ranks::input_of(operation, from * ranks + to);
  };
  Bytes in;
  Bytes wanted;
  std::vector<uint64_t> sent;
  std::vector<uint64_t> received;
  for (int other = 0; other < ranks; ++other) {
    const Bytes to = block_of(rank, other);
    const Bytes from = block_of(other, rank);
    in.insert(in.end(), to.begin(), to.end());
    wanted.insert(wanted.end(), from.begin(), from.end());
    sent.push_back(count_of(rank, other));
    received.push_back(count_of(other, rank));
  }
  Bytes out(wanted.size());
  const Bytes before = in;
  comm.alltoall(in.data(), sent.data(), out.data(), received.data(), call.operation.dtype, nullptr);
  CHECK(out == wanted);
  CHECK(in == before);
}

void run_call(hsgd::Communicator& comm, const Call& call, int rank, const Cluster& cluster) {
  switch (call.kind) {
    case Call::Kind::kReduceScatter:
      return run_reduce_scatter(comm, call, rank, cluster);
    case Call::Kind::kAllgather:
      return run_allgather(comm, call, rank);
    case Call::Kind::kAlltoall:
      return run_alltoall(comm, call, rank, cluster.size());
    case Call::Kind::kAllreduce: {
      Bytes data = ranks::input_of(call.operation, rank);
      comm.allreduce(data.data(), data.data(), call.operation.count, call.operation.dtype,
                     call.operation.op, nullptr);
      CHECK(data == cluster.expected(call.operation));
      return;
    }
    case Call::Kind::kBroadcast: {
      const Operation& operation = call.operation;
      Bytes data = ranks::input_of(operation, rank);
      comm.broadcast(data.data(), operation.count, operation.dtype, operation.root, nullptr);
      CHECK(data == ranks::input_of(operation, operation.root));
      return;
    }
  }
}

void random_program(const Cluster& cluster, uint64_t seed, int calls) {
  cluster.run([&](int rank, std::unique_ptr<hsgd::Communicator>& comm) {
    std::mt19937_64 program(seed);
    std::mt19937_64 own(seed + static_cast<uint64_t>(rank));
    for (int i = 0; i < calls; ++i) {
      ranks::dawdle(own);
      run_call(*comm, draw(program, cluster.size()), rank, cluster);
    }
  });
}

std::vector<std::vector<int>> one_node_and_several() {
  std::vector<std::vector<int>> layouts = ranks::kLayouts;
  for (const int count : {1, 2, 3, 5}) layouts.push_back({count});
  return layouts;
}

}  // namespace

TEST("random programs give the reference, bit for bit, however ranks are numbered") {
  uint64_t seed = 1;
  for (const auto& layout : one_node_and_several()) {
    for (const bool dealt : {false, true}) {
      const Cluster cluster{layout, ranks::small_steps(), {1, seed % 3, 12}, dealt};
      random_program(cluster, seed++, ranks::kOperations / 20);
    }
  }
}

TEST("nodes that their last ranks lead give the reference, bit for bit") {
  uint64_t seed = 40;
  for (const std::vector<int>& layout : {std::vector<int>{2, 2}, {4, 2, 3}, {1, 3}, {9, 10}}) {
    for (const bool dealt : {false, true}) {
      Cluster cluster{layout, ranks::small_steps(), {1, seed % 3, 12}, dealt};
      cluster.let_the_last_lead();
      random_program(cluster, seed++, ranks::kOperations / 40);
    }
  }
}

TEST("every step size, number of slots and one-shot size gives the same result") {
  hsgd_options options = ranks::small_steps();
  for (const uint32_t slots : {3u, 4u, 7u}) {
    for (const uint64_t chunk_bytes : {512u, 12345u, 65536u}) {
      options.slots = slots;
      options.wire_chunk_bytes = options.chunk_bytes = chunk_bytes;
      options.oneshot_bytes = chunk_bytes == 12345u ? 0 : chunk_bytes == 512u ? 20000 : 100;
      options.nontemporal = slots == 4 ? 1 : 0;
      for (const std::vector<int>& layout : {std::vector<int>{2, 1, 2}, std::vector<int>{3}}) {
        random_program({layout, options, {1, 5, 12}, slots == 7}, slots + chunk_bytes,
                       ranks::kOperations / 80);
      }
    }
  }
}

namespace {

void compare_with_allreduce(const Cluster& cluster) {
  cluster.run([&](int rank, std::unique_ptr<hsgd::Communicator>& comm) {
    std::mt19937_64 program(7);
    for (const hsgd_dtype dtype : {HSGD_FLOAT32, HSGD_FLOAT64, HSGD_FLOAT16, HSGD_BFLOAT16}) {
      for (const uint64_t most : {3, 50, 9000}) {
        Operation operation = ranks::draw(program, cluster.size());
        const std::vector<uint64_t> counts =
            draw_counts(program, static_cast<size_t>(cluster.size()), most);
        operation.dtype = dtype;
        operation.count = sum(counts, 0, cluster.size());
        const Bytes in = ranks::input_of(operation, rank);
        Bytes all(in.size());
        comm->allreduce(in.data(), all.data(), operation.count, dtype, HSGD_MEAN, nullptr);
        const uint64_t count = counts[static_cast<size_t>(rank)];
        Bytes own(count * hsgd_dtype_bytes(dtype));
        comm->reduce_scatter(in.data(), own.data(), counts.data(), dtype, HSGD_MEAN, nullptr);
        CHECK(own == part_of(all, sum(counts, 0, rank), count, hsgd_dtype_bytes(dtype)));
      }
    }
  });
}

}  // namespace

TEST("a reduce_scatter gives what an allreduce gives, the mean too") {
  for (const auto& layout : one_node_and_several()) {
    compare_with_allreduce({layout, ranks::small_steps(), {}, true});
  }
}

namespace {

// More nodes than exchange directly: of one round more, of several, and with nodes that take no
// part in the rounds.
std::vector<Cluster> clusters_of_rounds() {
  std::vector<Cluster> clusters;
  for (const auto& [layout, radix] : std::vector<std::pair<std::vector<int>, uint32_t>>{
           {{1, 1, 1}, 2},
           {{2, 1, 2, 1}, 2},
           {{2, 1, 1, 2, 1}, 2},
           {{1, 1, 1, 1, 1, 1, 1}, 2},
           {{2, 1, 1, 1, 1, 2, 1, 1, 1}, 3},
           {{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, 3},
       }) {
    hsgd_options options = ranks::small_steps();
    options.wire_radix = radix;
    clusters.push_back({layout, options, {1, layout.size() % 3, 12}, layout.size() % 2 == 0});
  }
  return clusters;
}

}  // namespace

TEST("random programs on more nodes than exchange directly give the reference, bit for bit") {
  uint64_t seed = 400;
  for (const Cluster& cluster : clusters_of_rounds()) {
    random_program(cluster, seed++, 3 * ranks::kCrowdedCalls);
  }
}

TEST("on more nodes than exchange directly a reduce_scatter gives what an allreduce gives") {
  for (const Cluster& cluster : clusters_of_rounds()) compare_with_allreduce(cluster);
}

TEST("a reduce_scatter rounds between nodes as an allreduce does") {
  for (const auto& layout : ranks::kLayouts) {
    for (const hsgd_dtype narrow : {HSGD_BFLOAT16, HSGD_FLOAT16}) {
      hsgd_options options = ranks::small_steps();
      options.wire_dtype = narrow;
      const Cluster cluster{layout, options, {1, 3, 9}, true};
      cluster.run([&](int rank, std::unique_ptr<hsgd::Communicator>& comm) {
        std::mt19937_64 program(11);
        for (const uint64_t most : {700, 5000, 40000}) {
          Operation operation = ranks::draw(program, cluster.size());
          const std::vector<uint64_t> counts =
              draw_counts(program, static_cast<size_t>(cluster.size()), most);
          operation.dtype = HSGD_FLOAT32;
          operation.count = sum(counts, 0, cluster.size());
          const bool whole = operation.bytes() <= options.wire_oneshot_bytes;
          const Bytes in = ranks::input_of(operation, rank);
          const Bytes all = cluster.expected(operation, whole ? HSGD_FLOAT32 : narrow);
          const uint64_t count = counts[static_cast<size_t>(rank)];
          Bytes own(count * sizeof(float));
          comm->reduce_scatter(in.data(), own.data(), counts.data(), HSGD_FLOAT32, operation.op,
                               nullptr);
          CHECK(own == part_of(all, sum(counts, 0, rank), count, sizeof(float)));
          // The mean is divided before the last rounding, and other dtypes are exact.
          Bytes mean(in.size());
          comm->allreduce(in.data(), mean.data(), operation.count, HSGD_FLOAT32, HSGD_MEAN,
                          nullptr);
          comm->reduce_scatter(in.data(), own.data(), counts.data(), HSGD_FLOAT32, HSGD_MEAN,
                               nullptr);
          CHECK(own == part_of(mean, sum(counts, 0, rank), count, sizeof(float)));
          operation.dtype = HSGD_INT32;
          comm->reduce_scatter(in.data(), own.data(), counts.data(), HSGD_INT32, operation.op,
                               nullptr);
          CHECK(own ==
                part_of(cluster.expected(operation), sum(counts, 0, rank), count, sizeof(float)));
        }
      });
    }
  }
}

namespace {

// Has all ranks make a call that rank `odd` makes differently, small and large; they must be told
// alike, with what `part` says, keep their data and go on.
void disagree(const Cluster& cluster, int odd, const std::string& part,
              const std::function<void(hsgd::Communicator&, bool, uint64_t, std::vector<double>&,
                                       std::vector<double>&)>& call) {
  std::vector<std::string> told(static_cast<size_t>(cluster.size()));
  cluster.run([&](int rank, std::unique_ptr<hsgd::Communicator>& comm) {
    for (const uint64_t count : {3, 7000}) {
      const auto size = static_cast<uint64_t>(cluster.size());
      std::vector<double> in(count * (size + 2), 1.0);
      std::vector<double> out(count * (size + 2), 5.0);
      std::string message;
      CHECK_EQ(status_of([&] { call(*comm, rank == odd, count, in, out); }, &message),
               HSGD_ERR_SIGNATURE);
      for (const double value : in) CHECK_EQ(value, 1.0);
      for (const double value : out) CHECK_EQ(value, 5.0);
      told[static_cast<size_t>(rank)] += message;
      std::vector<double> good(count, 1.0);
      comm->allreduce(good.data(), good.data(), count, HSGD_FLOAT64, HSGD_SUM, nullptr);
      for (const double value : good) CHECK_EQ(value, 1.0 * cluster.size());
    }
  });
  for (const std::string& text : told) CHECK_EQ(text, told[0]);
  if (!CHECK(told[0].find(part) != std::string::npos)) {
    std::fprintf(stderr, "%s\n", told[0].c_str());
  }
}

std::vector<uint64_t> even(const Cluster& cluster, uint64_t count) {
  return std::vector<uint64_t>(static_cast<size_t>(cluster.size()), count);
}

}  // namespace

TEST("ranks that give other counts are told so alike, with both sides, and go on") {
  for (const auto& layout : one_node_and_several()) {
    const Cluster cluster{layout, ranks::small_steps(), {1, 3, 6}, true};
    if (cluster.size() == 1) continue;
    for (const int odd : {0, cluster.size() - 1}) {
      const std::string rank = hsgd::text("rank %d sent ", odd);
      const auto last = static_cast<size_t>(cluster.size() - 1);
      for (const bool same_total : {true, false}) {
        disagree(cluster, odd, rank,
                 [&](auto& comm, bool is_odd, uint64_t count, auto& in, auto& out) {
                   std::vector<uint64_t> counts = even(cluster, count);
                   if (is_odd) ++counts[last];
                   if (is_odd && same_total) --counts[0];
                   comm.reduce_scatter(in.data(), out.data(), counts.data(), HSGD_FLOAT64, HSGD_SUM,
                                       nullptr);
                 });
        disagree(cluster, odd, rank,
                 [&](auto& comm, bool is_odd, uint64_t count, auto& in, auto& out) {
                   std::vector<uint64_t> counts = even(cluster, count);
                   if (is_odd) --counts[last];
                   if (is_odd && same_total) ++counts[0];
                   comm.allgather(in.data(), out.data(), counts.data(), HSGD_FLOAT64, nullptr);
                 });
      }
      disagree(cluster, odd, hsgd::text("rank %d called allgather of ", odd),
               [&](auto& comm, bool is_odd, uint64_t count, auto& in, auto& out) {
                 const std::vector<uint64_t> counts = even(cluster, count);
                 if (is_odd) {
                   comm.allgather(in.data(), out.data(), counts.data(), HSGD_FLOAT64, nullptr);
                 } else {
                   comm.alltoall(in.data(), counts.data(), out.data(), counts.data(), HSGD_FLOAT64,
                                 nullptr);
                 }
               });
    }
  }
}

TEST("an alltoall that does not add up is told to all, with the pair and its two counts") {
  for (const auto& layout : one_node_and_several()) {
    const Cluster cluster{layout, ranks::small_steps(), {1, 3, 6}, true};
    if (cluster.size() == 1) continue;
    const int odd = cluster.size() - 1;
    for (const int peer : {0, odd}) {
      const std::string sends = hsgd::text(
          "alltoall #1: rank %d sends 4 float64 to rank %d, and rank %d expects 3 float64 from it",
          odd, peer, peer);
      const std::string expects = hsgd::text(
          "alltoall #1: rank %d sends 3 float64 to rank %d, and rank %d expects 4 float64 from it",
          peer, odd, odd);
      for (const bool sender : {true, false}) {
        disagree(cluster, odd, sender ? sends : expects,
                 [&](auto& comm, bool is_odd, uint64_t count, auto& in, auto& out) {
                   std::vector<uint64_t> sent = even(cluster, count);
                   std::vector<uint64_t> received = sent;
                   if (is_odd) ++(sender ? sent : received)[static_cast<size_t>(peer)];
                   comm.alltoall(in.data(), sent.data(), out.data(), received.data(), HSGD_FLOAT64,
                                 nullptr);
                 });
      }
    }
  }
}

TEST("an alltoall does not add up when the right counts go to the wrong ranks") {
  for (const auto& layout : one_node_and_several()) {
    const Cluster cluster{layout, ranks::small_steps(), {1, 3, 6}, true};
    if (cluster.size() == 1) continue;
    const int odd = cluster.size() - 1;
    const std::string told =
        hsgd::text("rank %d sends 4 float64 to rank 0, and rank 0 expects 3 float64 from it", odd);
    disagree(cluster, odd, told, [&](auto& comm, bool is_odd, uint64_t count, auto& in, auto& out) {
      // Rank j gets count + j % 2 from each; the odd rank gives ranks 0 and 1 the other's.
      std::vector<uint64_t> sent = even(cluster, count);
      for (size_t to = 1; to < sent.size(); to += 2) ++sent[to];
      const uint64_t own = count + static_cast<uint64_t>(comm.topology().rank % 2);
      if (is_odd) std::swap(sent[0], sent[1]);
      comm.alltoall(in.data(), sent.data(), out.data(), even(cluster, own).data(), HSGD_FLOAT64,
                    nullptr);
    });
  }
}

namespace {

// `narrow`: of the sums between nodes.
void count_bytes(hsgd_dtype narrow) {
  const double share = narrow == HSGD_FLOAT32 ? 1.0 : 0.5;
  for (const auto& layout : ranks::kLayouts) {
    hsgd_options options = ranks::small_steps();
    options.wire_chunk_bytes = 1 << 18;
    options.wire_dtype = narrow;
    const Cluster cluster{layout, options, {}, true};
    const std::vector<int> node_of = cluster.node_of_rank();
    constexpr uint64_t kCount = 1 << 16;  // per block
    constexpr double kBytes = kCount * sizeof(float);
    const double size = cluster.size();
    struct Moved {
      std::atomic<uint64_t> sent{0};
      std::atomic<uint64_t> received{0};
    };
    std::vector<std::vector<Moved>> moved(3);
    for (auto& nodes : moved) nodes = std::vector<Moved>(layout.size());
    cluster.run([&](int rank, std::unique_ptr<hsgd::Communicator>& comm) {
      const std::vector<uint64_t> counts = even(cluster, kCount);
      const size_t all = kCount * static_cast<size_t>(cluster.size());
      std::vector<float> one(all, 1.0f);
      std::vector<float> other(all);
      for (size_t i = 0; i < 3; ++i) {
        const hsgd_counters before = comm->counters();
        if (i == 0) {
          comm->reduce_scatter(one.data(), other.data(), counts.data(), HSGD_FLOAT32, HSGD_SUM,
                               nullptr);
        } else if (i == 1) {
          comm->allgather(one.data(), other.data(), counts.data(), HSGD_FLOAT32, nullptr);
        } else {
          comm->alltoall(one.data(), counts.data(), other.data(), counts.data(), HSGD_FLOAT32,
                         nullptr);
        }
        const hsgd_counters after = comm->counters();
        Moved& of_node = moved[i][static_cast<size_t>(node_of[static_cast<size_t>(rank)])];
        of_node.sent += after.inter_bytes_sent - before.inter_bytes_sent;
        of_node.received += after.inter_bytes_received - before.inter_bytes_received;
      }
    });
    for (size_t node = 0; node < layout.size(); ++node) {
      const double here = layout[node];
      const double nodes = static_cast<double>(layout.size());
      const double sent[] = {share * (size - here), here * (nodes - 1), here * (size - here)};
      const double received[] = {share * here * (nodes - 1), size - here, here * (size - here)};
      for (size_t i = 0; i < 3; ++i) {
        const auto near = [&](uint64_t bytes, double blocks) {
          const auto value = static_cast<double>(bytes);
          return value > 0.99 * blocks * kBytes && value < 1.02 * blocks * kBytes;
        };
        CHECK(near(moved[i][node].sent, sent[i]));
        CHECK(near(moved[i][node].received, received[i]));
      }
    }
  }
}

}  // namespace

TEST("each byte crosses a link once for each node that needs it") { count_bytes(HSGD_FLOAT32); }

TEST("16-bit floats between nodes halve the bytes of a reduce_scatter, and of nothing else here") {
  count_bytes(HSGD_BFLOAT16);
}

TEST("many ranks share small chunks") {
  hsgd_options options = ranks::small_steps();
  options.chunk_bytes = options.wire_chunk_bytes = 512;
  options.oneshot_bytes = 64;
  random_program({{24}, options, {}}, 3, ranks::kCrowdedCalls);
  random_program({{12, 1}, options, {}, true}, 4, ranks::kCrowdedCalls);
}

TEST("when a rank leaves, the others learn it in each of the collectives") {
  for (const std::vector<int>& layout : {std::vector<int>{3}, std::vector<int>{2, 2}}) {
    const Cluster cluster{layout, ranks::small_steps(), {}};
    const int last = cluster.size() - 1;
    for (int kind = 0; kind < 3; ++kind) {
      for (const uint64_t count : {2, 9000}) {
        cluster.run([&](int rank, std::unique_ptr<hsgd::Communicator>& comm) {
          comm->barrier();
          if (rank == last) {
            comm.reset();
            return;
          }
          const std::vector<uint64_t> counts = even(cluster, count);
          std::vector<double> in(count * static_cast<size_t>(cluster.size()));
          std::vector<double> out(in.size());
          std::string message;
          const auto call = [&] {
            if (kind == 0) {
              comm->reduce_scatter(in.data(), out.data(), counts.data(), HSGD_FLOAT64, HSGD_SUM,
                                   nullptr);
            } else if (kind == 1) {
              comm->allgather(in.data(), out.data(), counts.data(), HSGD_FLOAT64, nullptr);
            } else {
              comm->alltoall(in.data(), counts.data(), out.data(), counts.data(), HSGD_FLOAT64,
                             nullptr);
            }
          };
          CHECK_EQ(status_of(call, &message), HSGD_ERR_PEER_LOST);
          CHECK(message.find(hsgd::text("rank %d (pid ", last)) != std::string::npos);
          CHECK_EQ(status_of(call), HSGD_ERR_PEER_LOST);
        });
      }
    }
  }
}
