#include "ops_cpu/page_file.h"

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#ifndef _WIN32
#include <fcntl.h>
#include <unistd.h>
#endif

namespace kvq {

#ifdef _WIN32

PageFile::PageFile(int) : descriptor_(-1) {
  throw std::runtime_error("an archive in a file needs POSIX; use in_memory=True");
}
PageFile::~PageFile() = default;
int PageFile::write(int64_t, const void*, int64_t) const { return ENOSYS; }
int PageFile::read(int64_t, void*, int64_t) const { return ENOSYS; }

#else

PageFile::PageFile(int descriptor) : descriptor_(fcntl(descriptor, F_DUPFD_CLOEXEC, 0)) {
  if (descriptor_ < 0)
    throw std::runtime_error(std::string("the archive's file: ") + std::strerror(errno));
}

PageFile::~PageFile() { close(descriptor_); }

int PageFile::write(int64_t offset, const void* from, int64_t bytes) const {
  const char* at = static_cast<const char*>(from);
  while (bytes > 0) {
    const ssize_t done = pwrite(descriptor_, at, static_cast<size_t>(bytes), offset);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return done < 0 ? errno : EIO;
    at += done, offset += done, bytes -= done;
  }
  return 0;
}

int PageFile::read(int64_t offset, void* to, int64_t bytes) const {
  char* at = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t done = pread(descriptor_, at, static_cast<size_t>(bytes), offset);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return done < 0 ? errno : EIO;
    at += done, offset += done, bytes -= done;
  }
  return 0;
}

#endif

}  // namespace kvq
