"""Logs that the tests make themselves."""

import random


def request_log(lines, seed=0):
    """A web server's log: requests, each of four lines that other requests' lines come between."""
    rng, made, waiting, number = random.Random(seed), [], [], 0
    while len(made) < lines:
        if len(waiting) < 5:
            number += 1
            waiting.append([f"req-{number + 100000}", 0])
        request = rng.choice(waiting)
        name, step = request
        second = len(made) // 4
        text = (
            f"accepted {name} from 10.0.0.{rng.randrange(1, 9)}",
            f"{name} query users took {rng.randrange(10, 99)} ms",
            f"{name} rendered page with status {rng.choice((200, 200, 200, 304))}",
            f"closed {name}",
        )[step]
        made.append(f"2024-05-01 {second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d} INFO {text}".encode())
        request[1] += 1
        if request[1] == 4:
            waiting.remove(request)
    return made


def block_log(sessions, seed=0, anomalous=0.03):
    """A storage system's log, and session → whether it is anomalous: cut short, or with a line that others lack."""
    rng, queue, labels = random.Random(seed), [], {}
    for number in range(sessions):
        name = f"blk_{rng.choice(('', '-'))}{rng.randrange(10**17, 10**18)}"
        is_anomalous = number > 50 and rng.random() < anomalous
        labels[name] = is_anomalous
        steps = [f"allocate {name} for /data/part-{rng.randrange(1000):05d}"]
        steps += [f"receiving {name} src 10.0.{i}.{rng.randrange(99)}:50010" for i in range(3)]
        steps += [f"received {name} of size {rng.randrange(10**6, 10**7)}" for _ in range(3)]
        steps += [f"deleting {name}"] * 3
        if is_anomalous:
            steps = steps[: rng.randrange(2, 6)] if rng.random() < 0.5 else [*steps, f"could not delete {name}"]
        begin = number * 3.0
        queue += [(begin + place * 2 + rng.random() * 3, text) for place, text in enumerate(steps)]
    queue.sort()
    clocks = [f"{int(t) // 3600:02d}{int(t) // 60 % 60:02d}{int(t) % 60:02d}" for t, _ in queue]
    lines = [
        f"081109 {clock} {rng.randrange(9000)} INFO {text}" for clock, (_, text) in zip(clocks, queue, strict=True)
    ]
    return [line.encode() for line in lines], labels
