//! Turns, in every order in which room may come.

use futures_util::FutureExt as _;

use super::*;

fn has_turn(place: &Place) -> bool {
    place.turn().now_or_never().is_some()
}

fn projects() -> (ProjectId, ProjectId) {
    let mut both = [ProjectId::random(), ProjectId::random()];
    both.sort();
    let [a, b] = both;
    (a, b)
}

#[test]
fn those_of_one_project_are_served_in_the_order_of_their_arrival() {
    let queue = Queue::default();
    let (project, _) = projects();
    let places: Vec<_> = (0..3)
        .map(|_| queue.join(&project, true, 1).expect("room"))
        .collect();
    assert!(has_turn(&places[0]), "it may try at once, lest room was missed");
    places[0].refused(true);
    assert!(!places.iter().any(has_turn), "the node is full");
    let mut places = places.into_iter();
    for _ in 0..3 {
        queue.freed();
        let first = places.next().expect("one is left");
        assert!(has_turn(&first));
        assert!(
            places.as_slice().first().is_none_or(|next| !has_turn(next)),
            "one at a time"
        );
        drop(first);
        // The next one tries whether there is more.
        if let Some(next) = places.as_slice().first() {
            assert!(has_turn(next));
            next.refused(true);
        }
    }
    assert_eq!(queue.ahead(&project), None);
}

#[test]
fn projects_take_turns_and_one_at_its_limit_holds_nobody_up() {
    let queue = Queue::default();
    let (a, b) = projects();
    let first = queue.join(&a, true, 1).expect("room");
    assert!(has_turn(&first));
    first.refused(true);
    let second = queue.join(&a, true, 1).expect("room");
    assert!(has_turn(&first));
    first.refused(true);
    let other = queue.join(&b, true, 1).expect("room");
    assert!(has_turn(&other), "its project is next");
    other.refused(true);
    queue.freed();
    assert!(has_turn(&first));
    first.refused(false);
    assert!(has_turn(&other), "the first project is at its own limit");
    drop(other);
    assert!(!has_turn(&first) && !has_turn(&second));
    queue.freed();
    assert!(has_turn(&first));
}

#[test]
fn who_leaves_passes_the_turn_on() {
    let queue = Queue::default();
    let (project, _) = projects();
    let first = queue.join(&project, true, 1).expect("room");
    let second = queue.join(&project, true, 1).expect("room");
    assert!(has_turn(&first));
    drop(first);
    assert!(has_turn(&second));
    drop(second);
    assert_eq!(queue.len(), 0);
}

#[test]
fn room_that_comes_during_a_try_is_not_missed() {
    let queue = Queue::default();
    let (project, _) = projects();
    let place = queue.join(&project, true, 1).expect("room");
    assert!(has_turn(&place));
    queue.freed();
    place.refused(true);
    assert!(has_turn(&place), "it tries again");
}

#[test]
fn who_is_refused_by_the_node_itself_keeps_its_place() {
    let queue = Queue::default();
    let (project, _) = projects();
    let first = queue.join(&project, true, 1).expect("room");
    let second = queue.join(&project, true, 1).expect("room");
    assert!(has_turn(&first));
    let hold = queue.hold();
    first.refused(true);
    assert!(!has_turn(&second), "held");
    let third = queue.join(&project, true, 1).expect("room");
    assert!(
        ![&first, &second, &third].into_iter().any(has_turn),
        "a newcomer begins no round"
    );
    assert_eq!(queue.ahead(&project), Some(Ahead::Node));
    drop(hold);
    assert!(has_turn(&first) && !has_turn(&second) && !has_turn(&third));
}

#[test]
fn the_node_is_left_alone_until_the_last_refusal_is_waited_out_or_something_ends() {
    let queue = Queue::default();
    let (project, _) = projects();
    let first = queue.join(&project, true, 1).expect("room");
    assert!(has_turn(&first));
    let (one, other) = (queue.hold(), queue.hold());
    first.refused(true);
    drop(one);
    assert!(!has_turn(&first), "the other one is held still");
    queue.freed();
    assert!(has_turn(&first), "something has ended");
    other.spent();
    first.refused(true);
    assert!(!has_turn(&first), "what was spent begins no round");
}

#[test]
fn one_whose_machine_is_made_holds_nobody_up_and_comes_back_to_its_place() {
    let queue = Queue::default();
    let (project, _) = projects();
    let first = queue.join(&project, true, 1).expect("room");
    let second = queue.join(&project, true, 1).expect("room");
    assert!(has_turn(&first));
    first.making();
    assert!(has_turn(&second));
    second.making();
    assert_eq!(queue.ahead(&project), None);
    let hold = queue.hold();
    second.refused(true);
    first.refused(true);
    drop(hold);
    assert!(has_turn(&first) && !has_turn(&second));
}

#[test]
fn a_project_at_its_own_limit_holds_no_other_up() {
    let queue = Queue::default();
    let (a, b) = projects();
    let places = [true, true, false].map(|for_node| queue.join(&a, for_node, 1).expect("room"));
    assert!(has_turn(&places[0]));
    assert_eq!(queue.ahead(&b), Some(Ahead::Node));
    places[0].refused(false);
    assert!(!places.iter().any(has_turn));
    assert_eq!(queue.ahead(&b), None, "none of them waits for the node");
    assert_eq!(queue.ahead(&a), Some(Ahead::Project));
}

#[test]
fn only_so_many_and_so_much_may_wait() {
    let queue = Queue::default();
    let (project, _) = projects();
    let places: Vec<_> = (0..MAX_WAITING).map(|_| queue.join(&project, true, 1)).collect();
    assert!(places.iter().all(Result::is_ok));
    assert!(queue.join(&project, true, 1).is_err());
    drop(places);
    let large = queue.join(&project, true, MAX_BYTES - 1).expect("room");
    assert!(queue.join(&project, true, 2).is_err());
    assert!(queue.join(&project, true, 1).is_ok());
    drop(large);
    assert!(queue.join(&project, true, 2).is_ok());
}
