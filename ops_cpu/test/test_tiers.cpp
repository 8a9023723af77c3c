// The far tier's codes and kernels, and attention over two tiers, against the scalar kernels.
#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "ops_cpu/e4m3.h"
#include "ops_cpu/far.h"
#include "ops_cpu/test/check.h"
#include "ops_cpu/tiered_attention.h"
#include "ops_cpu/tile.h"

namespace {

using namespace kvq;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<uint8_t> encode(const Kernels& k, const FarLayout& f, const std::vector<float>& key,
                            const std::vector<float>& value) {
  FarBuffer buffer(f);
  buffer.key = key;
  buffer.value = value;
  std::vector<uint8_t> record(f.record_bytes, 0xAA);
  encode_far(k, f, buffer, record.data());
  return record;
}

void test_records(const Kernels& k) {
  for (auto [key_dim, value_dim] : {std::pair{32, 512}, {64, 64}, {80, 48}, {128, 144}})
    for (float sigma : {1.0f, 1e-3f, 1e-6f, 1e-30f, 3e4f, 0.0f}) {
      const FarLayout f = make_far_layout(key_dim, value_dim);
      std::vector<float> key = normal(kTileTokens * key_dim, sigma);
      std::vector<float> value = normal(kTileTokens * value_dim, sigma);
      for (std::vector<float>* x : {&key, &value})
        for (float& v : *x) v = std::min(std::max(v, -kLargestInput), kLargestInput);
      const std::vector<uint8_t> record = encode(k, f, key, value);
      expect(record == encode(scalar_tier(), f, key, value),
             "far record " + std::to_string(key_dim) + "/" + std::to_string(value_dim));
      for (int i = 0; i < kTileTokens * key_dim; ++i)
        expect((record[f.key_code + i] & kMagnitudeE4M3) != kMagnitudeE4M3, "no code is NaN");
    }
}

// Every finite code, read by a query that sees one channel.
void test_codes(const Kernels& k) {
  constexpr int kDim = 256;
  std::vector<uint8_t> codes(kTileTokens * kDim);
  const auto code_at = [](int t, int c) { return static_cast<uint8_t>((c + 5 * t) & 255); };
  for (int t = 0; t < kTileTokens; ++t)
    for (int c = 0; c < kDim; ++c)
      codes[fp8_place(t, c, kDim)] = (code_at(t, c) & 127) == 127 ? uint8_t{0} : code_at(t, c);
  const std::vector<uint16_t> scales(kTileTokens, float_to_half(1.0f));
  float scores[kTileTokens];
  for (int c = 0; c < kDim; ++c) {
    std::vector<float> query(kDim, 0.0f);
    query[c] = 1.0f;
    k.far->score_fp8(codes.data(), codes.data(), scales.data(), kDim, query.data(), 1, scores);
    for (int t = 0; t < kTileTokens; ++t)
      expect(scores[t] == e4m3_to_float(codes[fp8_place(t, c, kDim)]),
             "code " + std::to_string(codes[fp8_place(t, c, kDim)]));
  }
  for (int code = 0; code < 256; ++code) {
    if ((code & 127) == 127) continue;
    const auto byte = static_cast<uint8_t>(code);
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const double size =
        exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
    expect(e4m3_to_float(byte) == (code & 128 ? -size : size), "value of " + std::to_string(code));
    expect(float_to_e4m3(e4m3_to_float(byte)) == byte, "code of its value " + std::to_string(code));
  }
  expect(float_to_e4m3(1e9f) == 126 && float_to_e4m3(-1e9f) == 254, "saturation");
}

void test_selection(const Kernels& k) {
  for (int tiles : {1, 3, kSelectTiles})
    for (int wanted : {1, 8, 33, 64})
      for (int kind = 0; kind < 4; ++kind) {
        const int64_t stride = 3 * kTileTokens;
        std::vector<float> scores = normal(tiles * stride);
        for (size_t i = 0; i < scores.size(); ++i) {
          if (kind == 1 && i % 7) scores[i] = -kInfinity;
          if (kind == 2) scores[i] = 1.0f;
          if (kind == 3 && i % 11 == 0) scores[i] = std::nanf("");
        }
        const float floor = kind == 3 ? 0.5f : -kInfinity;
        int16_t places[kSelectTiles * kTileTokens];
        const int count = k.far->select(scores.data(), stride, tiles, wanted, floor, places);
        std::vector<std::pair<float, int>> all;
        for (int i = 0; i < tiles * kTileTokens; ++i) {
          const float x = scores[i / kTileTokens * stride + i % kTileTokens];
          if (x > floor) all.push_back({-x, i});
        }
        std::sort(all.begin(), all.end());
        all.resize(std::min<size_t>(all.size(), wanted));
        expect(std::is_sorted(places, places + count), "places in order");
        for (auto [score, place] : all)
          expect(std::binary_search(places, places + count, place), "the best are selected");
        for (int i = 0; i < count; ++i)
          expect(scores[places[i] / kTileTokens * stride + places[i] % kTileTokens] > floor,
                 "what is selected is above the floor");
      }
}

void test_groups(const Kernels& k) {
  for (int rows : {1, 3, 16}) {
    std::vector<float> p(rows * kTileTokens);
    for (size_t i = 0; i < p.size(); ++i) p[i] = std::exp2(-float(i * 37 % 29));
    p[5] = std::nanf("");
    std::fill(p.begin() + 40, p.begin() + 48, 1e-9f);
    for (int r = 1; r < rows; ++r)
      for (int t = 40; t < 48; ++t) p[r * kTileTokens + t] = 1e-9f;
    std::vector<float> a = p, b = p;
    const int groups = k.far->needed_groups(a.data(), rows, 1e-7f);
    expect(groups == scalar_tier().far->needed_groups(b.data(), rows, 1e-7f), "needed groups");
    expect(groups == (kAllGroups & ~(1 << 5)), "the group that is not needed");
    for (size_t i = 0; i < a.size(); ++i)
      expect(a[i] == b[i] || (a[i] != a[i] && b[i] != b[i]), "weights of groups");
    expect(a[40] == 0.0f && a[47] == 0.0f && a[48] == p[48], "weights become 0");
  }
}

constexpr int64_t kHeads = 2, kFar = 20 * kTileTokens + 9, kSinks = 3, kRecent = 30;

// A row of far tiles of which some tokens are near, with more of the near ones.
struct Tiers {
  TieredCall call{};
  std::vector<uint8_t> tiles;
  std::vector<int32_t> table, lengths, index, count, candidate_index, skipped;
  std::vector<int64_t> promoted;
  std::vector<float> balance, key, value, query, out, lse, candidate_score, near_score;

  Tiers(bool fp8, int key_dim, int value_dim, int64_t group, int64_t queries) {
    TieredCall& c = call;
    c.fp8 = fp8;
    c.far = make_far_layout(key_dim, value_dim);
    c.layout = make_layout(key_dim, value_dim, 4, 4, 0);
    c.type = c.query_type = Float::kFloat32;
    c.batch = 1, c.kv_heads = kHeads, c.heads = kHeads * group, c.queries = queries;
    c.sink_tokens = kSinks, c.candidates = 6;
    c.max_pages = (kFar + kTileTokens - 1) / kTileTokens;
    lengths = {2, 2 + kSinks + kFar + kRecent, kFar};
    for (int64_t i = 0; i < c.max_pages; ++i)
      table.push_back(static_cast<int32_t>(c.max_pages - 1 - i));
    balance.assign(kHeads * key_dim, 0.7f);
    promoted.assign(kHeads * c.max_pages, 0);
    c.capacity = kFar / 5 + kRecent + kSinks + 8;
    index.assign(kHeads * c.capacity, -1);
    count.assign(kHeads, 0);
    for (int64_t h = 0; h < kHeads; ++h) choose_near(h);
    key = normal(kHeads * c.capacity * key_dim, 2.0f);
    value = normal(kHeads * c.capacity * value_dim);
    query = normal(c.heads * queries * key_dim);
    write_tiles();
    out.resize(c.heads * queries * value_dim);
    lse.resize(c.heads * queries);
    candidate_index.resize(kHeads * c.candidates), candidate_score.resize(kHeads * c.candidates);
    near_score.resize(kHeads * c.capacity), skipped.resize(kHeads);
    point();
  }

  void choose_near(int64_t head) {
    std::vector<int32_t> near;
    for (int64_t t = 0; t < kSinks + kFar + kRecent; ++t) {
      const bool is_far = t >= kSinks && t < kSinks + kFar;
      if (is_far && engine() % 8 != 0) continue;
      near.push_back(static_cast<int32_t>(t));
      if (is_far)
        promoted[head * call.max_pages + (t - kSinks) / kTileTokens] |=
            static_cast<int64_t>(uint64_t{1} << (t - kSinks) % kTileTokens);
    }
    near.push_back(-1);
    std::shuffle(near.begin(), near.end(), engine);
    std::copy(near.begin(), near.end(), index.begin() + head * call.capacity);
    count[head] = static_cast<int32_t>(near.size());
  }

  void write_tiles() {
    const TieredCall& c = call;
    const int64_t bytes = c.fp8 ? c.far.record_bytes : c.layout.record_bytes;
    tiles.resize(c.max_pages * c.kv_heads * bytes);
    for (int64_t i = 0; i < c.max_pages * c.kv_heads; ++i) {
      FarBuffer far(c.far);
      TileBuffer tile(c.layout);
      far.key = tile.key = normal(kTileTokens * c.layout.key_dim, 2.0f);
      far.value = tile.value = normal(kTileTokens * c.layout.value_dim);
      if (c.fp8) {
        encode_far(scalar_tier(), c.far, far, tiles.data() + i * bytes);
      } else {
        encode_tile(scalar_tier(), c.layout, balance.data(), 0, tile, tiles.data() + i * bytes);
      }
    }
    call.tiles_stride[0] = c.kv_heads * bytes, call.tiles_stride[1] = bytes;
  }

  void point() {
    TieredCall& c = call;
    c.query = query.data();
    c.query_stride[1] = c.queries * c.layout.key_dim, c.query_stride[2] = c.layout.key_dim;
    c.tiles = tiles.data(), c.block_table = table.data(), c.lengths = lengths.data();
    c.balance = c.fp8 ? nullptr : balance.data();
    c.exact_key = key.data(), c.exact_value = value.data();
    for (auto [stride, dim] : {std::pair<int64_t*, int64_t>{c.exact_key_stride, c.layout.key_dim},
                               {c.exact_value_stride, c.layout.value_dim}}) {
      stride[0] = 0, stride[1] = c.capacity * dim, stride[2] = dim;
    }
    c.near_index = index.data(), c.near_count = count.data(), c.promoted = promoted.data();
    c.scale = 0.2f, c.is_causal = true, c.exact = true;
    c.out = out.data(), c.lse = lse.data();
    c.candidate_index = candidate_index.data(), c.candidate_score = candidate_score.data();
    c.near_score = near_score.data(), c.skipped = skipped.data();
  }

  // Every result, one after the other.
  std::vector<float> run(const Kernels& k, const ParallelFor& parallel_for) {
    tiered_attention(k, call, parallel_for);
    std::vector<float> all = out;
    for (const std::vector<float>* x : {&lse, &candidate_score, &near_score})
      all.insert(all.end(), x->begin(), x->end());
    for (const std::vector<int32_t>* x : {&candidate_index, &skipped})
      all.insert(all.end(), x->begin(), x->end());
    return all;
  }
};

void test_attention(const Kernels& k) {
  struct Shape {
    int key_dim, value_dim;
    int64_t group, queries;
  };
  for (bool fp8 : {true, false})
    for (const Shape& s : {Shape{64, 64, 1, 1},
                           {128, 128, 2, 1},
                           {32, 80, 3, 1},
                           {80, 48, 4, 1},
                           {64, 64, 5, 3},
                           {48, 112, 7, 1},
                           {64, 64, 2, 40},
                           {512, 32, 1, 2}}) {
      Tiers tiers(fp8, s.key_dim, s.value_dim, s.group, s.queries);
      check_near(tiers.call);
      const std::vector<float> wanted = tiers.run(scalar_tier(), run_inline);
      const std::string name = std::string(fp8 ? "fp8-int4 " : "tile4 ") +
                               std::to_string(s.key_dim) + "/" + std::to_string(s.value_dim) +
                               ", group " + std::to_string(s.group);
      expect(same(tiers.run(k, run_inline), wanted), "two tiers " + name);
      expect(same(tiers.run(k, run_threads), wanted), "two tiers on several threads " + name);
      for (float x : tiers.out) expect(std::isfinite(x), "two tiers, no NaN " + name);
    }
}

// Whatever counts twice or not at all is refused.
void test_near_checks() {
  const auto refused = [](const TieredCall& call) {
    try {
      check_near(call);
    } catch (const std::logic_error&) {
      return true;
    }
    return false;
  };
  Tiers tiers(true, 64, 64, 1, 1);
  expect(!refused(tiers.call), "near tokens are as they should be");
  const auto is_far = [](int32_t token) { return token >= kSinks && token < kSinks + kFar; };
  int32_t& slot = *std::find_if(tiers.index.begin(), tiers.index.end(), is_far);
  const int32_t token = slot;
  for (int32_t other : {token + 1, -1, -2, 100000}) {
    slot = other;
    expect(refused(tiers.call), "near token " + std::to_string(other));
  }
  slot = token;
  tiers.promoted[3] ^= 1;
  expect(refused(tiers.call), "a promoted bit that is wrong");
  tiers.promoted[3] ^= 1;
  tiers.count[1] = static_cast<int32_t>(tiers.call.capacity + 1);
  expect(refused(tiers.call), "a count beyond the capacity");
}

}  // namespace

void test_tiers(const Kernels& k) {
  test_records(k);
  test_codes(k);
  test_selection(k);
  test_groups(k);
  test_attention(k);
  if (&k == &scalar_tier()) test_near_checks();
}
