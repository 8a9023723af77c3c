// Every instruction set of this machine against the scalar kernels, and several threads against
// one, bit for bit, without torch. Arguments name the instruction sets to expect, fastest first.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "ops_cpu/append.h"
#include "ops_cpu/attention.h"
#include "ops_cpu/half.h"
#include "ops_cpu/kernels.h"
#include "ops_cpu/test/check.h"
#include "ops_cpu/tile.h"
#include "ops_cpu/x.h"

namespace {

using namespace kvq;

void test_transform(const Kernels& k) {
  for (int dim = kMinHeadDim; dim <= kMaxHeadDim; dim += 16) {
    const std::vector<float> x = normal(dim);
    std::vector<float> a = x, b = x;
    k.transform->fwht(a.data(), rotation(dim));
    scalar_tier().transform->fwht(b.data(), rotation(dim));
    expect(same(a, b), "fwht " + std::to_string(dim));
    k.transform->fwht_inverse(a.data(), rotation(dim));
    scalar_tier().transform->fwht_inverse(b.data(), rotation(dim));
    expect(same(a, b), "fwht_inverse " + std::to_string(dim));
    float worst = 0.0f;
    for (int d = 0; d < dim; ++d) worst = std::max(worst, std::fabs(a[d] - x[d]));
    expect(worst < 1e-5f, "fwht_inverse undoes fwht " + std::to_string(dim));
  }
}

void test_conversions(const Kernels& k) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (Float type : {Float::kFloat16, Float::kBFloat16}) {
    std::vector<float> a(all.size()), b(all.size());
    k.transform->load(all.data(), type, a.data(), all.size());
    scalar_tier().transform->load(all.data(), type, b.data(), all.size());
    for (size_t i = 0; i < a.size(); ++i)  // a signalling NaN may come out quiet
      if (a[i] != a[i] && b[i] != b[i]) a[i] = b[i] = 0.0f;
    expect(same(a, b), "load");
    std::vector<float> x = normal(1001, 100.0f);
    x[0] = 65504.0f, x[1] = 65519.9f, x[2] = 65520.0f, x[3] = 1e-7f, x[4] = 3e-8f, x[5] = -0.0f;
    std::vector<uint16_t> c(x.size()), d(x.size());
    k.transform->store(x.data(), c.data(), type, x.size());
    scalar_tier().transform->store(x.data(), d.data(), type, x.size());
    expect(same(c, d), "store");
  }
}

void test_encode(const Kernels& k) {
  for (int dim : {32, 48, 80, 128, 144, 512})
    for (int bits : {2, 3, 4})
      for (float sigma : {1.0f, 1e-30f, 3e4f, 0.0f}) {
        alignas(64) float z[kMaxHeadDim + 64] = {};
        std::copy_n(normal(dim, sigma).data(), dim, z);
        std::vector<uint8_t> a(dim), b(dim);
        const float scale_a = encode_vector(*k.encode, z, dim, bits, a.data());
        const float scale_b = encode_vector(*scalar_tier().encode, z, dim, bits, b.data());
        expect(same(a, b) && scale_a == scale_b,
               "encode " + std::to_string(dim) + " at " + std::to_string(bits));
      }
}

// Records of layer inputs and what they decode to; the buffers end where they must not be passed.
void test_x(const Kernels& k) {
  for (int bits : {2, 3, 4, 8})
    for (bool per_channel : {false, true})
      for (int64_t channels : {64, 192})
        for (float sigma : {1.0f, 1e-7f, 0.0f}) {
          const XLayout f = make_x_layout(channels, bits, per_channel, 4);
          const std::vector<float> x = normal(kTileTokens * channels, sigma);
          std::vector<uint8_t> record[2];
          std::vector<float> decoded[2];
          for (int i = 0; i < 2; ++i) {
            const Kernels& tier = i ? scalar_tier() : k;
            XBuffer buffer(f);
            std::copy(x.begin(), x.end(), buffer.rows.begin());
            record[i].resize(f.record_bytes);
            decoded[i].resize(x.size());
            encode_x(tier, f, true, buffer, record[i].data());
            decode_x(tier, f, true, record[i].data(), buffer, Float::kFloat32,
                     reinterpret_cast<uint8_t*>(decoded[i].data()));
          }
          expect(same(record[0], record[1]) && same(decoded[0], decoded[1]),
                 "x of " + std::to_string(channels) + " at " + std::to_string(bits));
        }
}

// A layer of two rows, appended to in uneven steps, and attention over it.
struct Layer {
  Layout layout;
  LayerState state;
  std::vector<uint8_t> storage;
  std::vector<int32_t> table, lengths;
  std::vector<float> balance, key, value;

  Layer(int key_dim, int value_dim, int key_bits, int value_bits, int64_t heads, int64_t tokens) {
    layout = make_layout(key_dim, value_dim, key_bits, value_bits, 4);
    const int64_t batch = 2, pages = tokens / kTileTokens + 1, capacity = 160;
    storage.assign(batch * pages * heads * layout.record_bytes + 64, 0xFF);
    for (int64_t i = 0; i < batch * pages; ++i) table.push_back(static_cast<int32_t>(i));
    std::shuffle(table.begin(), table.end(), std::mt19937(2));
    lengths = {0, 0, 0, 5, 0, 0};
    balance.assign(batch * heads * key_dim, 0.0f);
    const float nan = bits_float(0x7FC00000);
    key.assign(batch * heads * capacity * key_dim, nan);
    value.assign(batch * heads * capacity * value_dim, nan);
    auto* tiles = storage.data() + (64 - reinterpret_cast<uintptr_t>(storage.data()) % 64) % 64;
    state = {layout,        Float::kFloat32, batch,          heads,
             batch * pages, pages,           capacity,       4,
             tiles,         table.data(),    balance.data(), key.data(),
             value.data(),  lengths.data()};
  }
};

std::vector<float> attend(const Kernels& k, Layer& layer, int64_t group, int64_t queries,
                          const std::vector<float>& query, bool exact,
                          const ParallelFor& parallel_for) {
  const Layout& f = layer.layout;
  const LayerState& s = layer.state;
  const int64_t heads = s.kv_heads * group;
  std::vector<float> out(s.batch * heads * queries * f.value_dim), lse(s.batch * heads * queries);
  AttentionCall c{};
  c.layout = f;
  c.type = c.query_type = Float::kFloat32;
  c.batch = s.batch, c.heads = heads, c.kv_heads = s.kv_heads, c.queries = queries;
  c.max_pages = s.max_pages, c.sink_tokens = s.sink_tokens;
  c.query = query.data();
  c.query_stride[0] = heads * queries * f.key_dim;
  c.query_stride[1] = queries * f.key_dim;
  c.query_stride[2] = f.key_dim;
  c.tiles = s.tiles;
  c.tiles_stride[0] = s.kv_heads * f.record_bytes, c.tiles_stride[1] = f.record_bytes;
  c.block_table = s.block_table, c.balance = s.balance;
  c.exact_key = s.exact_key, c.exact_value = s.exact_value;
  for (auto [stride, dim] : {std::pair<int64_t*, int64_t>{c.exact_key_stride, f.key_dim},
                             {c.exact_value_stride, f.value_dim}}) {
    stride[0] = s.kv_heads * s.capacity * dim;
    stride[1] = s.capacity * dim;
    stride[2] = dim;
  }
  c.lengths = s.lengths;
  c.scale = 0.3f, c.is_causal = true, c.exact = exact;
  c.out = out.data(), c.lse = lse.data();
  attention(k, c, parallel_for);
  out.insert(out.end(), lse.begin(), lse.end());
  return out;
}

struct Shape {
  int key_dim, value_dim, key_bits, value_bits;
  int64_t group, queries;

  std::string name() const {
    return std::to_string(key_dim) + "/" + std::to_string(value_dim) + " at " +
           std::to_string(key_bits) + "/" + std::to_string(value_bits) + ", group " +
           std::to_string(group);
  }
};

struct Inputs {
  std::vector<float> key, value, query;
};

struct Outcome {
  std::vector<uint8_t> records;
  std::vector<float> exact, fast;
};

constexpr int64_t kHeads = 2, kTokens = 333;

Outcome run_layer(const Kernels& k, const Shape& shape, const Inputs& in,
                  const ParallelFor& parallel_for) {
  const auto [key_dim, value_dim, key_bits, value_bits, group, queries] = shape;
  Layer layer(key_dim, value_dim, key_bits, value_bits, kHeads, kTokens);
  const LayerState& s = layer.state;
  const AppendRule rule{64, 96};
  for (int64_t done = 0, step = 1; done < kTokens; done += step, step = step % 70 + 23) {
    step = std::min(step, kTokens - done);
    const NewTokens key{in.key.data() + done * key_dim,
                        {kHeads * kTokens * key_dim, kTokens * key_dim, key_dim}};
    const NewTokens value{in.value.data() + done * value_dim,
                          {kHeads * kTokens * value_dim, kTokens * value_dim, value_dim}};
    check_append(s, step, rule);
    append(k, s, key, value, step, rule, parallel_for);
  }
  return {{s.tiles, s.tiles + s.pages * kHeads * s.layout.record_bytes},
          attend(k, layer, group, queries, in.query, true, parallel_for),
          attend(k, layer, group, queries, in.query, false, parallel_for)};
}

// A layer with what the scalar kernels make of it.
struct LayerCase {
  Shape shape;
  Inputs in;
  Outcome wanted;

  explicit LayerCase(const Shape& s)
      : shape(s),
        in{normal(2 * kHeads * kTokens * s.key_dim, 2.0f),
           normal(2 * kHeads * kTokens * s.value_dim),
           normal(2 * kHeads * s.group * s.queries * s.key_dim)},
        wanted(run_layer(scalar_tier(), s, in, run_inline)) {}
};

std::vector<LayerCase> layer_cases() {
  std::vector<LayerCase> cases;
  for (int bits : {4, 3, 2})
    for (int group : {1, 2, 3, 4, 5, 7, 8, 16})
      cases.emplace_back(Shape{64, 64, bits, bits, group, 1});
  for (int dim : {32, 48, 80, 96, 112, 128, 192, 512})
    cases.emplace_back(Shape{dim, dim, 4, 3, 3, 1});
  cases.emplace_back(Shape{128, 64, 3, 2, 4, 5});
  cases.emplace_back(Shape{64, 96, kPassThroughBits, kPassThroughBits, 2, 7});
  return cases;
}

void test_layer(const Kernels& k, const LayerCase& layer) {
  const auto& [shape, in, wanted] = layer;
  const Outcome one = run_layer(k, shape, in, run_inline);
  const Outcome many = run_layer(k, shape, in, run_threads);
  expect(same(one.records, wanted.records), "records " + shape.name());
  expect(same(one.exact, wanted.exact), "attention " + shape.name());
  expect(same(one.fast, wanted.fast), "fast attention " + shape.name());
  expect(same(one.records, many.records), "records of several threads " + shape.name());
  expect(same(one.exact, many.exact), "attention of several threads " + shape.name());
  expect(same(one.fast, many.fast), "fast attention of several threads " + shape.name());
  double error = 0.0, norm = 0.0;
  for (size_t i = 0; i < one.exact.size(); ++i) {
    expect(one.exact[i] == one.exact[i], "no NaN " + shape.name());
    error += (one.fast[i] - one.exact[i]) * (one.fast[i] - one.exact[i]);
    norm += one.exact[i] * one.exact[i];
  }
  expect(error < 36e-4 * norm, "fast " + shape.name());
}

}  // namespace

int main(int count, char** arguments) {
  const std::vector<std::string> wanted(arguments + 1, arguments + count);
  const std::vector<LayerCase> layers = layer_cases();
  std::vector<std::string> found;
  for (auto tier = available(); *tier; ++tier) {
    const Kernels& k = **tier;
    const int before = failures;
    found.push_back(k.name);
    test_transform(k);
    test_conversions(k);
    test_encode(k);
    test_x(k);
    test_extremes(k);
    test_tiers(k);
    for (const LayerCase& layer : layers) test_layer(k, layer);
    std::printf("%-12s %s%s\n", k.name, failures == before ? "equals scalar" : "DIFFERS",
                &k == &active() ? ", active" : "");
  }
  test_archive();
  expect(wanted.empty() || found == wanted, "the instruction sets of the command line");
  return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
