//! What carries the bytes of a migration.

use crate::raw::{Incoming, Outgoing};
use std::io;
use std::os::fd::BorrowedFd;

/// A byte stream between two hosts. No call of it waits.
pub trait Connection {
    /// Reads what is there now into `buffer`; `WouldBlock` if nothing is, `UnexpectedEof` at the
    /// end.
    fn read_now(&self, buffer: &mut [u8]) -> io::Result<usize>;

    /// Writes what there is room for now; `WouldBlock` if that is nothing.
    fn write_now(&self, bytes: &[u8]) -> io::Result<usize>;

    /// As [`Connection::write_now`], straight from guest memory.
    fn send(&self, pieces: &mut Outgoing<'_>) -> io::Result<usize>;

    /// As [`Connection::read_now`], straight into guest memory.
    fn receive(&self, pieces: Incoming<'_>) -> io::Result<usize>;

    /// The descriptor behind it, if the kernel can move bytes from it into a file.
    fn fd(&self) -> Option<BorrowedFd<'_>>;
}
