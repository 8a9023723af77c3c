#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/checks.h"
#include "csrc/tensors.h"
#include "ops_cpu/x.h"

namespace kvq {
namespace {

XLayout check_x_layout(int64_t channels, int64_t bits, std::string_view axis, Float type) {
  if (!valid_channels(channels))
    value_error("channels must be a positive multiple of 64, got " + std::to_string(channels));
  if (!valid_x_bits(bits))
    value_error("bits must be 2, 3, 4, 8 or 16, got " + std::to_string(bits));
  if (axis != "token" && axis != "channel")
    value_error("axis must be 'token' or 'channel', got '" + std::string(axis) + "'");
  return make_x_layout(channels, static_cast<int>(bits), axis == "channel",
                       static_cast<int>(size_of(type)));
}

void check_packed(const char* name, int64_t bits) {
  if (bits == kPassThroughBits)
    value_error(std::string(name) + " must be 2, 3, 4 or 8 in a sum of records, got 16");
}

Tensor quantize_x(const Tensor& x, int64_t bits, std::string_view axis, bool rotate) {
  check_rank("x", x, 3);
  const Float type = float_type("x", x);
  const XLayout f = check_x_layout(x.size(2), bits, axis, type);
  const int64_t batch = x.size(0), tokens = x.size(1);
  if (f.per_channel && tokens % kTileTokens)
    value_error(
        "x.shape[1] must be a multiple of 64 (tokens of a group) with axis='channel', got shape " +
        shape_text(x));
  const int64_t pages = (tokens + kTileTokens - 1) / kTileTokens;
  const Tensor in = with_contiguous_rows(x);
  Tensor out = empty({batch, pages, f.record_bytes}, ScalarType::Byte);
  const auto* from = static_cast<const uint8_t*>(in.const_data_ptr());
  auto* to = out.mutable_data_ptr<uint8_t>();
  const int64_t item = size_of(type), row_step = in.stride(0) * item, step = in.stride(1) * item;
  const Kernels& kernels = active();
  run_parallel(batch * pages, [&](int64_t begin, int64_t end) {
    XBuffer buffer(f);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % pages * kTileTokens;
      const int64_t there = std::min<int64_t>(kTileTokens, tokens - first);
      const uint8_t* token = from + i / pages * row_step + first * step;
      uint8_t* record = to + i * f.record_bytes;
      if (f.pass_through()) {
        for (int64_t t = 0; t < there; ++t)
          std::memcpy(record + t * f.channels * item, token + t * step, f.channels * item);
        std::memset(record + there * f.channels * item, 0,
                    (kTileTokens - there) * f.channels * item);
        continue;
      }
      for (int64_t t = 0; t < there; ++t)
        kernels.transform->load_bounded(token + t * step, type, &buffer.rows[t * f.channels],
                                        static_cast<int>(f.channels));
      std::fill(buffer.rows.begin() + there * f.channels, buffer.rows.end(), 0.0f);
      encode_x(kernels, f, rotate, buffer, record);
    }
  });
  return out;
}

Tensor dequantize_x(const Tensor& records, int64_t channels, int64_t bits, std::string_view axis,
                    bool rotate, ScalarType dtype) {
  const Float type = float_type("dtype", dtype);
  const XLayout f = check_x_layout(channels, bits, axis, type);
  check_rank("records", records, 3);
  check_dtype("records", records, ScalarType::Byte);
  check_size("records", records, 2, f.record_bytes, "record_bytes");
  const Tensor in = with_contiguous_rows(records);
  const int64_t batch = records.size(0), pages = records.size(1);
  Tensor out = empty({batch, pages * kTileTokens, channels}, dtype);
  const auto* from = in.const_data_ptr<uint8_t>();
  auto* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  const int64_t bytes = kTileTokens * channels * size_of(type);
  const int64_t row_step = in.stride(0), step = in.stride(1);
  const Kernels& kernels = active();
  run_parallel(batch * pages, [&](int64_t begin, int64_t end) {
    XBuffer buffer(f);
    for (int64_t i = begin; i < end; ++i) {
      const uint8_t* record = from + i / pages * row_step + i % pages * step;
      if (f.pass_through()) {
        std::memcpy(to + i * bytes, record, bytes);
      } else {
        decode_x(kernels, f, rotate, record, buffer, type, to + i * bytes);
      }
    }
  });
  return out;
}

Tensor sum_x(std::vector<Tensor> records, int64_t channels, std::vector<int64_t> bits,
             int64_t out_bits, std::string_view axis) {
  if (records.empty() || records.size() != bits.size())
    value_error("records must hold a tensor for each of bits, got " +
                std::to_string(records.size()) + " tensors and " + std::to_string(bits.size()) +
                " bits");
  std::vector<XLayout> from;
  std::vector<Tensor> held;
  for (size_t i = 0; i < records.size(); ++i) {
    const std::string name = "records[" + std::to_string(i) + "]";
    from.push_back(check_x_layout(channels, bits[i], axis, Float::kFloat32));
    check_packed("bits", bits[i]);
    check_rank(name.c_str(), records[i], 3);
    check_dtype(name.c_str(), records[i], ScalarType::Byte);
    check_size(name.c_str(), records[i], 0, records[0].size(0), "records[0].shape[0]");
    check_size(name.c_str(), records[i], 1, records[0].size(1), "records[0].shape[1]");
    check_size(name.c_str(), records[i], 2, from[i].record_bytes, "record_bytes");
    held.push_back(with_contiguous_rows(records[i]));
  }
  const XLayout f = check_x_layout(channels, out_bits, axis, Float::kFloat32);
  check_packed("out_bits", out_bits);
  const int64_t batch = records[0].size(0), pages = records[0].size(1);
  Tensor out = empty({batch, pages, f.record_bytes}, ScalarType::Byte);
  auto* to = out.mutable_data_ptr<uint8_t>();
  const Kernels& kernels = active();
  run_parallel(batch * pages, [&](int64_t begin, int64_t end) {
    XBuffer buffer(f);
    std::vector<float> part(buffer.rows.size());
    for (int64_t i = begin; i < end; ++i) {
      std::vector<float> total(part.size());
      for (size_t n = 0; n < held.size(); ++n) {
        const uint8_t* record = held[n].const_data_ptr<uint8_t>() + i / pages * held[n].stride(0) +
                                i % pages * held[n].stride(1);
        float* decoded = n ? part.data() : total.data();
        decode_x(kernels, from[n], false, record, buffer, Float::kFloat32,
                 reinterpret_cast<uint8_t*>(decoded));
        for (size_t j = 0; n && j < part.size(); ++j) total[j] = total[j] + part[j];
      }
      for (int64_t t = 0; t < kTileTokens; ++t)
        kernels.transform->load_bounded(&total[t * channels], Float::kFloat32,
                                        &buffer.rows[t * channels], static_cast<int>(channels));
      encode_x(kernels, f, false, buffer, to + i * f.record_bytes);
    }
  });
  return out;
}

}  // namespace
}  // namespace kvq

STABLE_TORCH_LIBRARY_IMPL(kvq, CPU, m) {
  m.impl("quantize_x", TORCH_BOX(&kvq::quantize_x));
  m.impl("sum_x", TORCH_BOX(&kvq::sum_x));
  m.impl("dequantize_x", TORCH_BOX(&kvq::dequantize_x));
}
