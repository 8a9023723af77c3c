// A file of pages, read and written at positions. It is not mapped: a disk that is full or gone is
// then an error code, while under a mapping it is a signal that ends the process.
#pragma once
#include <cstdint>

namespace kvq {

class PageFile {
 public:
  // Works on a duplicate of the descriptor. Throws std::runtime_error when there is none.
  explicit PageFile(int descriptor);
  ~PageFile();
  PageFile(const PageFile&) = delete;
  PageFile& operator=(const PageFile&) = delete;

  // 0, or the number of the error; EIO when the file ends before `bytes` could be read.
  int write(int64_t offset, const void* from, int64_t bytes) const;
  int read(int64_t offset, void* to, int64_t bytes) const;

 private:
  int descriptor_;
};

}  // namespace kvq
