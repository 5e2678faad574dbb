//! Machines kept ready: taken, made again, given up.

use std::collections::BTreeSet;

use space_api::size::SizeClass;
use space_node_manager::ObjectName;
use space_vmm::ExitReason;

use super::*;
use crate::{NodeError, PoolConfig, fakes::Fault, locked};

/// A pool that reacts quickly, on a host with memory in plenty.
async fn pooled(change: impl FnOnce(&mut NodeConfig)) -> Fixture {
    pooled_on(World::new(), change).await
}

async fn pooled_on(world: Arc<World>, change: impl FnOnce(&mut NodeConfig)) -> Fixture {
    Fixture::on(world, |config| {
        config.pool = PoolConfig {
            max_machines: 4,
            min_per_key: 2,
            look_every: Duration::from_millis(20),
            ..PoolConfig::default()
        };
        change(config);
    })
    .await
}

impl Fixture {
    /// Names of the machines that are ready.
    fn ready(&self) -> BTreeSet<ObjectName> {
        self.node.shared.pool.names()
    }

    async fn until_ready(&self, count: usize) -> BTreeSet<ObjectName> {
        until(&format!("{count} are ready"), || {
            let pool = &self.node.shared.pool;
            self.ready().len() == count && pool.statuses().iter().all(|status| status.warming == 0)
        })
        .await;
        self.ready()
    }
}

#[tokio::test]
async fn a_create_takes_a_machine_that_was_ready_and_another_is_made() {
    let fixture = pooled(|_| {}).await;
    let before = fixture.until_ready(2).await;
    for name in &before {
        assert_eq!(
            fixture.world.weight(name),
            Some(100),
            "warm ones have their full share"
        );
        let life = fixture.world.life(name.as_str()).expect("lives");
        assert!(!life.runs(), "a ready machine stands still");
    }
    let request = CreateSandbox {
        environment: [("A".to_owned(), "B".to_owned())].into(),
        ..request()
    };
    let status = within(fixture.node.create(request.clone()))
        .await
        .expect("is created");
    assert!(
        before.iter().any(|name| name.as_str() == status.machine),
        "{status:?}"
    );
    let token = fixture.node.guest_token(&request.id).await.expect("lives");
    {
        let life = fixture.life(&request.id).expect("lives");
        assert!(life.runs());
        let known = locked(&life.guest.known);
        let (last, earlier) = known.identities.split_last().expect("it has one");
        assert_eq!(
            (last.hostname.as_str(), last.generation),
            (request.id.as_str(), 1)
        );
        assert_eq!(last.guest_token, token);
        assert!(!earlier.is_empty(), "it was warmed under throw-away ones");
        for other in earlier {
            assert_ne!(other.guest_token, last.guest_token);
            assert_ne!(other.machine_id, last.machine_id);
            assert_ne!(other.boot_id, last.boot_id);
            assert_ne!(other.entropy, last.entropy);
        }
        assert_eq!(
            known.environment,
            Some(serde_json::json!({ "envVars": { "A": "B" } }))
        );
    }
    let after = fixture.until_ready(2).await;
    assert!(!after.iter().any(|name| name.as_str() == status.machine));
    let pool = fixture.node.info().await.pool;
    assert_eq!(
        pool.iter()
            .map(|status| (status.template.as_str(), status.ready, status.target))
            .collect::<Vec<_>>(),
        [("base:latest", 2, 2)]
    );
    within(fixture.node.delete(&request.id))
        .await
        .expect("is deleted");
    fixture.close().await;
}

#[tokio::test]
async fn a_burst_larger_than_the_pool_all_succeeds_and_the_pool_grows() {
    let fixture = pooled(|_| {}).await;
    fixture.until_ready(2).await;
    let all = futures_util::future::join_all((0..12).map(|_| fixture.node.create(request())));
    let all = within(all).await;
    assert!(all.iter().all(Result::is_ok), "{all:?}");
    let machines: BTreeSet<_> = all.iter().flatten().map(|status| &status.machine).collect();
    assert_eq!(machines.len(), 12, "no machine is given out twice");
    fixture.until_ready(4).await;
    fixture.close().await;
}

#[tokio::test]
async fn a_pool_that_cannot_be_filled_keeps_nobody_waiting() {
    let fixture = pooled(|_| {}).await;
    fixture.until_ready(2).await;
    fixture.world.inject("set_group_weight", Fault::Fail);
    for _ in 0..5 {
        within(fixture.node.create(request()))
            .await
            .expect("made for it alone");
    }
    until("what failed is gone", || {
        fixture
            .world
            .objects()
            .iter()
            .filter(|object| object.starts_with("group"))
            .count()
            == 5
    })
    .await;
    fixture.world.mend();
    fixture.until_ready(4).await;
    fixture.close().await;
}

#[tokio::test]
async fn a_machine_that_dies_in_the_pool_is_replaced_and_never_given_out() {
    let fixture = pooled(|_| {}).await;
    let before = fixture.until_ready(2).await;
    for name in &before {
        fixture
            .world
            .life(name.as_str())
            .expect("lives")
            .exits(ExitReason::OutOfMemory);
    }
    let status = within(fixture.node.create(request())).await.expect("is created");
    assert!(!before.iter().any(|name| name.as_str() == status.machine));
    until("they are replaced", || {
        let ready = fixture.ready();
        ready.len() == 2 && ready.is_disjoint(&before)
    })
    .await;
    until("they are removed", || {
        fixture
            .world
            .objects()
            .iter()
            .all(|object| before.iter().all(|name| !object.ends_with(name.as_str())))
    })
    .await;
    fixture.close().await;
}

#[tokio::test]
async fn a_machine_that_dies_while_it_is_taken_is_made_up_for() {
    let fixture = pooled(|_| {}).await;
    let before = fixture.until_ready(2).await;
    for name in &before {
        fixture.world.life(name.as_str()).expect("lives").dies_at_resume();
    }
    // Else it might acknowledge before it dies.
    fixture.world.inject("identity", Fault::Hang);
    let request = request();
    let mending = async {
        until("one has died", || {
            let mut lives = before.iter().map(|name| fixture.world.life(name.as_str()));
            lives.any(|life| life.is_none_or(|life| life.has_exited()))
        })
        .await;
        fixture.world.mend();
    };
    let (status, ()) = within(async { tokio::join!(fixture.node.create(request.clone()), mending) }).await;
    let status = status.expect("is created all the same");
    assert!(!before.iter().any(|name| name.as_str() == status.machine));
    within(fixture.node.data(&request.id))
        .await
        .expect("it is usable");
    within(fixture.node.delete(&request.id))
        .await
        .expect("is deleted");
    fixture.close().await;
}

#[tokio::test]
async fn old_machines_are_renewed() {
    let fixture = pooled(|config| config.pool.renew_after = Duration::from_millis(200)).await;
    let before = fixture.until_ready(2).await;
    until("all are others", || {
        let ready = fixture.ready();
        ready.len() == 2 && ready.is_disjoint(&before)
    })
    .await;
    fixture.close().await;
}

#[tokio::test]
async fn what_is_used_becomes_pooled_and_what_is_no_longer_used_is_given_up() {
    let fixture = pooled(|config| {
        config.pool.pinned = Vec::new();
        config.pool.idle_drain_after = Duration::from_millis(500);
    })
    .await;
    assert_eq!(fixture.node.info().await.pool, []);
    let request = CreateSandbox {
        size: Some(SizeClass {
            memory_mib: 1024,
            ..SizeClass::DEFAULT
        }),
        ..request()
    };
    within(fixture.node.create(request.clone()))
        .await
        .expect("is created");
    fixture.until_ready(2).await;
    until("nobody asked for a while", || fixture.ready().is_empty()).await;
    within(fixture.node.delete(&request.id))
        .await
        .expect("is deleted");
    until("nothing is left", || fixture.leftovers().is_empty()).await;
    fixture.close().await;
}

#[tokio::test]
async fn a_template_that_is_replaced_or_removed_takes_its_machines_along() {
    let fixture = pooled(|_| {}).await;
    let before = fixture.until_ready(2).await;
    let held = Arc::strong_count(&fixture.world.template);
    *locked(&fixture.world.digest) = Some("sha256:1".to_owned());
    until("they are of the new one", || {
        let ready = fixture.ready();
        ready.len() == 2 && ready.is_disjoint(&before)
    })
    .await;
    let status = within(fixture.node.create(request())).await.expect("is created");
    assert_eq!(status.template_digest, "sha256:1");
    until("there are two again", || fixture.ready().len() == 2).await;
    assert_eq!(
        Arc::strong_count(&fixture.world.template),
        held + 1,
        "of the old one nothing is held"
    );
    *locked(&fixture.world.digest) = None;
    within(fixture.node.delete_template("base"))
        .await
        .expect_err("it is gone already");
    until("nothing is made of what is gone", || {
        fixture.ready().is_empty() && fixture.node.shared.pool.statuses().is_empty()
    })
    .await;
    fixture.close().await;
}

#[tokio::test]
async fn when_memory_is_short_machines_are_given_up_and_made_again_later() {
    let proc = directory();
    let available = |mib: u64| {
        let text = format!("MemAvailable: {} kB\n", mib * 1024);
        fs_err::write(proc.path().join("meminfo"), text).expect("ours");
    };
    available(10_000);
    // The fixture keeps no reserve, so that creates are let in; pressure tells the pool.
    let pressure = |percent: u32| {
        fs_err::create_dir_all(proc.path().join("pressure")).expect("ours");
        let text = format!("some avg10={percent}.00 avg60=0.00 avg300=0.00 total=0\n");
        fs_err::write(proc.path().join("pressure/memory"), text).expect("ours");
    };
    pressure(15);
    let fixture = pooled(|config| config.pool.proc_directory = proc.path().to_owned()).await;
    for _ in 0..3 {
        within(fixture.node.create(request())).await.expect("is created");
    }
    let pool = fixture.node.info().await.pool;
    assert!(
        pool.iter().all(|status| status.ready + status.warming == 0),
        "{pool:?}"
    );
    pressure(0);
    until("there are some", || fixture.ready().len() >= 2).await;
    pressure(25);
    until("they are given up", || fixture.ready().is_empty()).await;
    within(fixture.node.create(request())).await.expect("is created");
    pressure(0);
    until("they are back", || fixture.ready().len() >= 2).await;
    fixture.close().await;
}

#[tokio::test]
async fn a_create_never_lacks_the_memory_that_the_pool_has_taken() {
    // Room for three sandboxes of the default size and not much more.
    let one = (u64::from(SizeClass::DEFAULT.memory_mib) << 20) / 2 + (48 << 20);
    let fixture = pooled(|config| config.memory_budget = Some(3 * one + (1 << 20))).await;
    *locked(&fixture.world.group_memory) = 100 << 20;
    fixture.until_ready(2).await;
    for _ in 0..3 {
        within(fixture.node.create(request()))
            .await
            .expect("there is room for three");
    }
    let fourth = within(fixture.node.create(request())).await;
    assert!(matches!(fourth, Err(NodeError::NoCapacity { .. })), "{fourth:?}");
    until("the pool has given back what it had", || {
        fixture.ready().is_empty()
    })
    .await;
    fixture.close().await;
}

#[tokio::test]
async fn shutting_down_while_machines_are_made_leaves_nothing() {
    for step in ["create_group", "start", "hello", "identity", "set_group_weight"] {
        let world = World::new();
        world.inject(step, Fault::Hang);
        let fixture = pooled_on(world, |config| config.limits.stop = Duration::from_millis(500)).await;
        until("one is being made", || {
            let groups = fixture.world.objects();
            groups.iter().any(|object| object.starts_with("group"))
        })
        .await;
        let world = fixture.world.clone();
        let closing = fixture.close();
        let mending = async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            world.mend();
        };
        tokio::join!(closing, mending);
    }
}

#[tokio::test]
async fn a_step_that_panics_is_undone_and_tried_again() {
    let world = World::new();
    world.inject("start", Fault::Panic);
    let fixture = pooled_on(world, |_| {}).await;
    until("it has failed", || fixture.world.panics() > 0).await;
    until("it was undone", || {
        !fixture
            .world
            .objects()
            .iter()
            .any(|object| object.starts_with("group"))
    })
    .await;
    fixture.world.mend();
    fixture.until_ready(2).await;
    fixture.close().await;
}
