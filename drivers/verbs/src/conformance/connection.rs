//! Connecting, waiting, ending.

use super::bed::{Bed, completions, eventually, expect_status};
use super::{Profile, Site, Violation, expect};
use crate::error::{FirstCause, VerbsError};
use crate::fabric::{
    ACCEPT_DATA_BYTES_MAX, CONNECT_DATA_BYTES_MAX, Link, QueuePair, REJECT_DATA_BYTES_MAX, Setup,
};
use crate::work::{Completion, Status, WorkId};
use std::time::Duration;

/// Fails if `seen` is not `sent` with nothing but zeros behind.
fn expect_data(seen: &[u8], sent: &[u8]) -> Result<(), Violation> {
    let right = seen.strip_prefix(sent).is_some_and(|rest| rest.iter().all(|&byte| byte == 0));
    expect(right, || format!("sent {sent:x?}, seen {seen:x?}"))
}

pub(super) fn private_data<S: Site>(site: &S, _: &Profile) -> Result<String, Violation> {
    let setup = Setup::default();
    for (request, answer) in [
        (b"ask".to_vec(), b"yes".to_vec()),
        (vec![0x5a; CONNECT_DATA_BYTES_MAX], vec![0xa5; ACCEPT_DATA_BYTES_MAX]),
    ] {
        let connected = site.connect(&setup, &setup, &request, &answer)?;
        expect_data(&connected.request, &request)?;
        expect_data(&connected.answer, &answer)?;
    }
    let long = [1; CONNECT_DATA_BYTES_MAX + 1];
    let limit = matches!(site.connect(&setup, &setup, &long, &[]), Err(VerbsError::Limit { .. }));
    expect(limit, || "too much private data was taken".to_owned())?;
    Ok(String::new())
}

pub(super) fn rejection<S: Site>(site: &S, _: &Profile) -> Result<String, Violation> {
    let answer = [7; REJECT_DATA_BYTES_MAX];
    match site.connect_rejected(b"please", &answer) {
        VerbsError::Rejected { private_data, .. } => expect_data(&private_data, &answer)?,
        other => return Err(other.into()),
    }
    Ok(String::new())
}

pub(super) fn wait_for_completion<S: Site>(site: &S, _: &Profile) -> Result<String, Violation> {
    let mut bed = Bed::new(site)?;
    bed.from.fill(4096, 4096, 1);
    for round in 0..20 {
        bed.source.arm()?;
        let request = bed.write(round, 4096, 4096, 4096);
        bed.source.post(&[request])?;
        let mut place = [Completion::default()];
        let mut looks_left = 300;
        while bed.source.poll(&mut place)? == 0 {
            looks_left -= 1;
            expect(looks_left > 0, || "nobody was woken for a completion".to_owned())?;
            // Armed before the post, so each completion after it must end this.
            bed.source.wait(Duration::from_millis(100))?;
        }
        expect_status(&place[0], WorkId(round), Status::SUCCESS)?;
    }
    Ok(String::new())
}

pub(super) fn disconnect<S: Site>(site: &S, _: &Profile) -> Result<String, Violation> {
    let mut bed = Bed::new(site)?;
    bed.source.post_receives(&[WorkId(70), WorkId(71)])?;
    let request = bed.write(1, 4096, 4096, 4096);
    bed.execute(&[request])?;
    expect(bed.source.link() == Link::Up, || "the link is not up".to_owned())?;
    bed.target.disconnect();
    let own = bed.target.link();
    expect(own == Link::Disconnected, || format!("after its own disconnect: {own:?}"))?;
    eventually(&mut bed.source, "the peer's disconnect", |pair| pair.link() != Link::Up)?;
    let link = bed.source.link();
    expect(link == Link::Disconnected, || format!("after the peer's disconnect: {link:?}"))?;
    let mut cause = FirstCause::default();
    for completion in completions(&mut bed.source, 2)? {
        cause.on_completion(&completion);
    }
    let quiet = cause.cause().is_none() && cause.flushed() == 2;
    expect(quiet, || format!("receives end as {cause:?}"))?;
    bed.expect_failure(&request, &[Status::FLUSHED])?;
    Ok(String::new())
}
