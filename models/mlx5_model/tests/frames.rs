//! The network card: frames through split rings in guest memory, reached by keys.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests")]

mod host;

use host::Host;
use host::ring::Guest;
use martlet_mlx5_abi::virtq::VirtqState;
use martlet_mlx5_model::{ModelConfig, QueueState};

#[test]
fn frames_come_back_in_order_over_the_wrap_of_the_index() {
    for start in [0, 65_400] {
        let mut host = Host::new(ModelConfig::default());
        let mut guest = Guest::new(&mut host, 3, 64, start);
        guest.start(&mut host);
        let mut sent = 0;
        for _ in 0..200 {
            guest.refill();
            sent += guest.send();
            guest.kick(&host);
            guest.receive();
        }
        assert_eq!((sent, guest.missing()), (600, 0));
        let stats = host.model.stats();
        assert_eq!((stats.frames_sent, stats.frames_received), (600, 600));
        assert_eq!((stats.frames_dropped, stats.access_errors, stats.ring_errors), (0, 0, 0));
        assert!(stats.queues.iter().all(|queue| queue.state == QueueState::Ready));
        let object = host.query_queue(guest.pairs[0].tx_id);
        assert_eq!(object.state(), VirtqState::RDY);
        assert_eq!(object.hw_used_index.get(), start.wrapping_add(200));
    }
}
