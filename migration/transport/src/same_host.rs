//! Which user runs the other end of a TCP connection within this host, as the kernel knows it.

use rustix::process::Uid;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The kernel's connections of this thread's network namespace, each end with its user
/// (Documentation/networking/proc_net_tcp.rst).
const TABLES: [&str; 2] = ["/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"];

/// As the tables number it.
const ESTABLISHED: &str = "01";

/// Who has the other end of the connection between these; `None` if it may be on another host.
pub(crate) fn user_of(peer: SocketAddr, local: SocketAddr) -> Option<Uid> {
    let (peer, local) = (canonical(peer), canonical(local));
    // Anybody else is not worth a look at what may be a long table.
    if !peer.0.is_loopback() && peer.0 != local.0 {
        return None;
    }
    let tables = TABLES.iter().filter_map(|path| std::fs::read_to_string(path).ok());
    tables.filter_map(|table| user_in(&table, peer, local)).next()
}

type End = (IpAddr, u16);

fn canonical(address: SocketAddr) -> End {
    (address.ip().to_canonical(), address.port())
}

/// The user of the connection from `from` to `to`. One that is being opened or closed is not meant:
/// its ports may be another's soon.
fn user_in(table: &str, from: End, to: End) -> Option<Uid> {
    table.lines().skip(1).find_map(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let ends = (end(fields.next()?)?, end(fields.next()?)?);
        let is_open = fields.next()? == ESTABLISHED;
        let user = fields.nth(3)?.parse().ok()?;
        (is_open && ends == (from, to)).then(|| Uid::from_raw(user))
    })
}

/// An address as the tables have it: words of the host's byte order, and a port.
fn end(text: &str) -> Option<End> {
    let (ip, port) = text.split_once(':')?;
    let word = |at: usize| u32::from_str_radix(ip.get(at * 8..at * 8 + 8)?, 16).ok();
    let ip = match ip.len() {
        8 => Ipv4Addr::from(word(0)?.to_ne_bytes()).into(),
        32 => {
            let mut bytes = [0; 16];
            for (at, part) in bytes.chunks_exact_mut(4).enumerate() {
                part.copy_from_slice(&word(at)?.to_ne_bytes());
            }
            IpAddr::from(Ipv6Addr::from(bytes)).to_canonical()
        }
        _ => return None,
    };
    Some((ip, u16::from_str_radix(port, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    const TABLE: &str = "\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:8831 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0
   1: 0100007F:9C40 0100007F:8831 06 00000000:00000000 03:0000176F 00000000     0        0 0 3 0
   2: 0100007F:9C41 0100007F:8831 01 00000000:00000000 00:00000000 00000000  1000        0 2 1 0
   3: 0000000000000000FFFF00000100007F:9C42 0000000000000000FFFF00000100007F:8831 01 \
00000000:00000000 00:00000000 00000000  1001        0 3 1 0
   4: no line
";

    #[test]
    #[cfg(target_endian = "little")]
    fn a_connection_is_found_by_both_its_ends() {
        let at = |port| (IpAddr::from([127, 0, 0, 1]), port);
        let user = |from, to| user_in(TABLE, at(from), at(to)).map(Uid::as_raw);
        assert_eq!(user(0x9c41, 0x8831), Some(1000));
        assert_eq!(user(0x9c42, 0x8831), Some(1001), "a socket of both families");
        assert_eq!(user(0x8831, 0x9c41), None, "the other direction");
        assert_eq!(user(0x9c40, 0x8831), None, "closed");
        assert_eq!(user(0x8831, 0), None, "a listener");
        assert_eq!(user_in(TABLE, (IpAddr::from([10, 0, 0, 1]), 0x9c41), at(0x8831)), None);
    }

    #[test]
    fn both_ends_of_a_connection_within_this_process_are_its_users() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (ours, from) = listener.accept().unwrap();
            let own = Some(rustix::process::geteuid());
            assert_eq!(user_of(from, ours.local_addr().unwrap()), own);
            drop(peer);
            assert_eq!(user_of(from, ours.local_addr().unwrap()), None, "it is gone");
        }
    }
}
