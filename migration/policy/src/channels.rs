//! How many data channels suit a host.

/// Most channels that are used unasked. One channel copies 2 to 4 GB/s into a socket, so eight
/// fill a 100 Gbit/s link twice over; more would only take cores from guests.
const DEFAULT_CHANNELS_MAX: usize = 8;

/// The number of data channels for a host with `cores` cores: half of them, at least one, at most
/// eight.
///
/// A channel keeps one core busy, with the zero check and the copy into the socket. The other half
/// is for the guest's own vCPUs, which run all through pre-copy, and on a host that migrates to
/// itself for the receiving side.
pub fn default_channels(cores: usize) -> u16 {
    u16::try_from((cores / 2).clamp(1, DEFAULT_CHANNELS_MAX)).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_cores_between_one_and_eight() {
        let table = [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2), (7, 3), (8, 4), (16, 8), (256, 8)];
        for (cores, channels) in table {
            assert_eq!(default_channels(cores), channels, "{cores} cores");
        }
    }
}
