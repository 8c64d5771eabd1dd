//! The two things here that need unsafe code: a descriptor whose number the environment tells, and the end of the process.

use std::ffi::c_int;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_getfd};
use rustix::net::{AddressFamily, SocketType, getsockname, sockopt};

/// A duplicate of the socket that this process has inherited as descriptor `number`; else the reason why there is none.
///
/// The number may be out of date: a wrapper that closed its descriptors leaves the variable, and then the number is soon
/// given to a file or socket of this program's own. All that Rust and other careful code opens is marked to be closed on
/// exec, which something inherited cannot be; and the launcher's is a stream of the local domain.
pub(super) fn socket(number: c_int) -> Result<OwnedFd, String> {
    if number < 3 {
        return Err(format!("PMI_FD is {number}, which is no descriptor of a launcher"));
    }
    // SAFETY: not -1, and borrowed only for the two calls below, which take any number: one that is not open gives EBADF,
    // and neither call changes or closes what is behind one that is.
    let fd = unsafe { BorrowedFd::borrow_raw(number) };
    let (flags, copy) = match (fcntl_getfd(fd), fcntl_dupfd_cloexec(fd, 3)) {
        (Ok(flags), Ok(copy)) => (flags, copy),
        (Err(e), _) | (_, Err(e)) => return Err(format!("descriptor {number} (PMI_FD) was not inherited: {e}")),
    };
    let stream = getsockname(&copy).is_ok_and(|a| a.address_family() == AddressFamily::UNIX)
        && sockopt::socket_type(&copy).is_ok_and(|t| t == SocketType::STREAM);
    if flags.contains(FdFlags::CLOEXEC) || !stream {
        return Err(format!("descriptor {number} (PMI_FD) is not the launcher's; a wrapper may have closed that one"));
    }
    Ok(copy)
}

/// Has `f` called when the process exits by returning from `main` or by `exit`; false if that cannot be had.
pub(super) fn at_exit(f: extern "C" fn()) -> bool {
    unsafe extern "C" {
        // SAFETY: the C library's function, as the standard declares it; it may be called at any time with any function.
        safe fn atexit(f: extern "C" fn()) -> c_int;
    }
    atexit(f) == 0
}
