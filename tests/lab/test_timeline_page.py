"""The lanes of a timeline show what was measured, in the picture and on the page."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgba

from accel_demo.lab.timeline import page as timeline_page
from accel_demo.lab.timeline import picture as timeline_picture

PHASES = ["data wait", "forward", "backward", "all-reduce", "optimizer", "idle"]
PLANTED = "</script><script>document.title = 'planted'</script><img src=x onerror=alert(1)>"


def a_timeline(ranks=2, steps=3, late_ms=0.0, sweep=False, name="allreduce", model="small_cnn"):
    """What the verb gives, with lengths made up: the last rank begins every forward late."""
    everyone = []
    for rank in range(ranks):
        delay, bars, spans = late_ms if rank == ranks - 1 else 0.0, [], []
        for step in range(3, 3 + steps):
            start = (step - 3) * (41.0 + late_ms) + 0.1 * rank
            phases = {"data wait": 2.5 + delay, "forward": 11.25, "backward": 17.5}
            phases |= {"all-reduce": 3.125 + late_ms - delay, "optimizer": 5.0, "idle": 0.5}
            at = start
            for phase, length in phases.items():
                own = {"lane": "compute", "phase": phase, "name": phase, "bytes": None}
                if phase != "all-reduce":
                    bars.append({**own, "step": step, "start_ms": at, "end_ms": at + length})
                else:
                    computed = at
                at += length
            sent = {"lane": "communication", "phase": "all-reduce", "name": name, "step": step}
            for before, after, size in ((9.0, -4.0, 802_816), (3.5, -0.5, 401_408)):
                span = {"start_ms": computed - before, "end_ms": computed + after}
                bars.append({**sent, **span, "bytes": size})
            span = {"start_ms": computed - 1.5, "end_ms": computed + phases["all-reduce"]}
            bars.append({**sent, **span, "bytes": 1_234_567})
            length = sum(phases.values())
            spans.append({"step": step, "start_ms": start, "end_ms": at, "wall_ms": length})
            spans[-1] |= {"phases_ms": phases, "all_reduce_ms": 12.125, "hidden_ms": 9.0}
        everyone.append({"rank": rank, "clock_offset_ms": 0.0, "steps": spans, "bars": bars})
    summary = [
        {"rank": rank["rank"], "wall_ms": rank["steps"][0]["wall_ms"], "hidden_share": 9 / 12.125}
        | {"phases_ms": rank["steps"][0]["phases_ms"], "all_reduce_ms": 12.125}
        | {"late_ms": late_ms if rank["rank"] == ranks - 1 else 0.0}
        for rank in everyone
    ]
    return {
        **{"processes": ranks, "backend": "gloo", "device": "cpu", "model": model},
        **{
            "batch_size": 64,
            "accumulate": 1,
            "bucket_mb": 1.0,
            "bucket_bytes": [802_816, 401_408, 1_234_567],
        },
        **{"phases": PHASES, "ranks": everyone, "summary": summary},
        "straggler": {"rank": ranks - 1, "slower_ms": late_ms} if late_ms else None,
        "sweep": [
            {"bucket_mb": size, "buckets": buckets, "all_reduce_ms": 12.0 + buckets}
            | {"exposed_ms": 12.0 - hidden, "hidden_share": hidden / 24, "step_ms": 50 - hidden}
            for size, buckets, hidden in ((0.5, 5, 10.0), (25.0, 1, 0.5), (0.05, 12, 2.0))
            if sweep
        ],
    }


def bars_of(found):
    """Every bar with its rank, in the order of the page: by lane, then by start."""
    ranks = [
        sorted(
            ({**bar, "rank": rank["rank"]} for bar in rank["bars"] if bar["lane"] == lane),
            key=lambda bar: (bar["start_ms"], -bar["end_ms"]),
        )
        for rank in found["ranks"]
        for lane in ("compute", "communication")
    ]
    return [bar for bars in ranks for bar in bars]


def words_of(picture):
    """matplotlib draws letters as shapes, and notes each text in a comment."""
    return set(re.findall(r"<!-- (.*?) -->", picture.read_text()))


def test_the_picture_names_ranks_steps_and_phases_and_the_slow_rank(tmp_path):
    file = tmp_path / "lanes.svg"
    timeline_picture.draw(a_timeline(late_ms=20.0), file)
    words = words_of(file)
    assert {"step 3", "step 4", "step 5", "communication", *PHASES} <= words
    assert {"rank 0   compute", "rank 1 (slow)   compute"} <= words
    assert "rank 1 is slow: by 20.0 ms in each step" in words
    assert not any("bucket_cap_mb of DDP" in word for word in words)
    timeline_picture.draw(a_timeline(), file)
    assert "no rank is slower than the others in each step" in words_of(file)
    assert not any("slow)" in word for word in words_of(file))


def test_every_bar_of_the_picture_is_where_it_was_measured_in_the_colour_of_its_phase():
    found = a_timeline(ranks=3, late_ms=4.0)
    drawn, ranks = [], []
    for row in timeline_picture.figure_of(found).axes[0].collections:
        for path in row.get_paths():
            box = path.get_extents()
            drawn.append((round(box.x0, 6), round(box.x1, 6), tuple(row.get_facecolor()[0])))
            ranks.append((box.y0, box.y1))
    bars = bars_of(found)
    colours = {phase: to_rgba(timeline_picture.COLOUR_OF[phase]) for phase in PHASES}
    expected = [
        (round(bar["start_ms"], 6), round(bar["end_ms"], 6), colours[bar["phase"]]) for bar in bars
    ]
    assert sorted(drawn) == sorted(expected) and len(set(colours.values())) == len(PHASES)
    boxes = list(zip(drawn, ranks, strict=True))
    for (one, high), (other, low) in ((a, b) for a in boxes for b in boxes if a != b):
        apart = one[1] <= other[0] + 1e-5 or other[1] <= one[0] + 1e-5
        assert apart or high[1] <= low[0] or low[1] <= high[0], "two bars lie on one another"


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=30))
def test_bars_at_the_same_time_lie_in_rows_of_their_own_and_no_row_is_wasted(spans):
    bars = [
        {"lane": "communication", "start_ms": float(start), "end_ms": float(start + length)}
        for start, length in spans
    ]
    compute, lane = timeline_picture.lanes_of({"ranks": [{"rank": 0, "bars": bars}]})
    assert (compute["rows"], compute["bars"]) == (1, [])
    at_once = [
        sum(bar["start_ms"] <= moment < bar["end_ms"] for bar in lane["bars"])
        for moment in range(80)
    ]
    assert lane["rows"] == max(1, *at_once)
    for row in range(lane["rows"]):
        own = [bar for bar in lane["bars"] if bar["row"] == row]
        for one, next_one in zip(own, own[1:], strict=False):
            assert one["end_ms"] <= next_one["start_ms"]


def test_the_sweep_is_drawn_over_the_size_of_the_buckets():
    found = a_timeline(sweep=True)
    rows = {row["bucket_mb"]: row for row in sorted(found["sweep"], key=lambda r: r["bucket_mb"])}
    shares, lengths = timeline_picture.figure_of(found).axes[2:]
    for axes, key, scale in ((shares, "hidden_share", 100), (lengths, "step_ms", 1)):
        (line,) = axes.lines
        assert list(line.get_xdata()) == [0.05, 0.5, 25.0]
        assert list(line.get_ydata()) == [scale * rows[size][key] for size in rows]
        assert axes.get_xscale() == "log"
        assert [text.get_text() for text in axes.get_xticklabels()] == ["0.05", "0.5", "25"]
    assert len(timeline_picture.figure_of(a_timeline()).axes) == 2


def rows_of(page):
    rows = re.findall("<tr>(.*?)</tr>", page)
    return [re.findall("<t[dh][^>]*>(.*?)</t[dh]>", row) for row in rows]


def test_without_a_script_the_page_has_the_tables_and_names_the_slow_rank(tmp_path):
    file = tmp_path / "timeline.html"
    timeline_page.write(a_timeline(late_ms=20.0, sweep=True), file)
    page = file.read_text()
    assert "rank 1 is slow: by 20.0 ms in each step" in page
    assert "no rank is slower than the others in each step" not in page
    assert (
        "2 connected processes on cpu (gloo): small_cnn, batches of 64 images per process" in page
    )
    head, *ranks, sweep_head, first, second, last = rows_of(page)
    assert head[:8] == ["rank", "wall", *PHASES]
    assert [row[0] for row in ranks] == ["0", "1"]
    assert ranks[1][2:4] == ["22.50", "11.25"] and ranks[1][-2:] == ["74 %", "20.00"]
    assert sweep_head[0] == "bucket_cap_mb"
    assert sweep_head[3] == "exposed (ms)"
    assert [row[0] for row in (first, second, last)] == ["0.5", "25", "0.05"], "as it was asked for"
    assert last == ["0.05", "12", "24.00", "10.00", "8 %", "48.00"]
    timeline_page.write(a_timeline(), file)
    page = file.read_text()
    assert (
        "no rank is slower than the others in each step" in page
        and "is slow:" not in page
        and len(rows_of(page)) == 3
    )


def test_the_page_holds_every_bar_and_its_share_of_its_step():
    found = a_timeline(late_ms=20.0)
    data, expected = timeline_page.data_of(found), bars_of(found)
    assert len(data["bars"]) == len(expected) == 2 * 3 * 8
    for bar, measured in zip(data["bars"], expected, strict=True):
        length = measured["end_ms"] - measured["start_ms"]
        assert (bar["start"], bar["end"]) == (measured["start_ms"], measured["end_ms"])
        assert bar["rank"] == measured["rank"]
        assert bar["share"] == pytest.approx(length / 59.875)
    assert data["whole"] == timeline_picture.whole_of(found)
    assert [lane["is_slow"] for lane in data["lanes"]] == [False, False, True, True]


def test_the_sizes_of_the_buckets_are_told_as_they_are():
    words = timeline_picture.what_ran(a_timeline() | {"accumulate": 4})
    assert words.endswith("per process, 4 to a step, bucket_cap_mb 1 (0.77 + 0.38 + 1.18 MiB)")
    many = timeline_picture.what_ran(a_timeline() | {"bucket_bytes": [2**20] * 12})
    assert many.endswith("per process, bucket_cap_mb 1 (12 buckets)")


def test_a_run_on_one_process_has_an_empty_lane_of_communication(tmp_path):
    found = a_timeline(ranks=1)
    found["ranks"][0]["bars"] = [bar for bar in found["ranks"][0]["bars"] if bar["bytes"] is None]
    found |= {"bucket_bytes": [], "backend": "gloo"}
    timeline_picture.draw(found, tmp_path / "lanes.svg")
    timeline_page.write(found, tmp_path / "lanes.html")
    assert "1 connected process on cpu (gloo): small_cnn, batches of 64 images per process<" in (
        tmp_path / "lanes.html"
    ).read_text().replace("</p>", "<")
    assert len(timeline_page.data_of(found)["lanes"]) == 2
    assert timeline_picture.verdict(found) == "one process waits for nobody"


def test_the_page_has_no_handler_in_its_markup_and_escapes_every_name(tmp_path):
    file = tmp_path / "timeline.html"
    timeline_page.write(a_timeline(model=PLANTED, name=PLANTED), file)
    page = file.read_text()
    assert PLANTED not in page and "<img" not in page and page.count("</script>") == 2
    tags = re.findall(r"<[a-z][^>]*>", page.split("<script")[0])
    assert not any(re.search(r"\son\w+\s*=", tag) for tag in tags)
    assert all("src=" not in tag for tag in tags)


# In a browser


@pytest.fixture
def opened(open_page, tmp_path):
    """`opened(found, width)` gives the page of it, and its range before anything was done."""

    def opened(found, width=1280):
        file = tmp_path / "timeline.html"
        timeline_page.write(found, file)
        page = open_page(file, width)
        page.locator("[data-bar]").first.wait_for()
        return page

    return opened


def visible(page):
    """What `#range` says is visible: from when, to when, how long (ms)."""
    return [float(number) for number in re.findall(r"\d+\.\d+", page.inner_text("#range"))]


def settle(page):
    """Until the browser has drawn what it was told to."""
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def described(page):
    """What is said of the chosen bar."""
    parts = page.locator("#detail b").all()
    return {part.get_attribute("id").removeprefix("bar-"): part.inner_text() for part in parts}


def said_of(bar, found):
    """What is to be said of it."""
    rank = next(rank for rank in found["ranks"] if rank["rank"] == bar["rank"])
    wall = next(step["wall_ms"] for step in rank["steps"] if step["step"] == bar["step"])
    length = bar["end_ms"] - bar["start_ms"]
    said = {"rank": str(bar["rank"]), "phase": bar["phase"], "start": f"{bar['start_ms']:.3f} ms"}
    said |= {"duration": f"{length:.3f} ms"}
    said |= {"share": f"{100 * length / wall:.1f} % of step {bar['step']}"}
    said |= {"name": bar["name"]} if bar["name"] != bar["phase"] else {}
    return said | ({"bytes": f"{bar['bytes']:,}"} if bar["bytes"] is not None else {})


def near(one, other):
    return one == pytest.approx(other, abs=0.002)  # three numbers, rounded to 0.001 each


@pytest.mark.browser
def test_zoom_halves_the_visible_time_around_its_middle_and_whole_gives_it_back(opened):
    found = a_timeline()
    page = opened(found)
    start, end = timeline_picture.whole_of(found)
    whole, quarter = end - start, (end - start) / 4
    assert near(visible(page), [start, end, whole])
    page.get_by_role("button", name="zoom in, twice as large").click()
    assert near(visible(page), [start + quarter, end - quarter, whole / 2])
    page.get_by_role("button", name="zoom in, twice as large").click()
    assert near(visible(page), [start + 1.5 * quarter, end - 1.5 * quarter, whole / 4])
    page.get_by_role("button", name="move to later").click()
    assert near(visible(page), [start + 1.75 * quarter, end - 1.25 * quarter, whole / 4])
    page.get_by_role("button", name="move to earlier").click()
    page.get_by_role("button", name="zoom out, half as large").click()
    assert near(visible(page), [start + quarter, end - quarter, whole / 2])
    page.get_by_role("button", name="show the whole time").click()
    assert near(visible(page), [start, end, whole])
    for _ in range(20):
        page.click("#in")
    assert visible(page)[2] == 0.02, "there is an end to it"
    for _ in range(20):
        page.click("#out")
    assert near(visible(page), [start, end, whole])


@pytest.mark.browser
def test_pointing_at_a_bar_shows_what_the_json_has(opened):
    found = json.loads(json.dumps(a_timeline(late_ms=20.0)))
    page = opened(found)
    seen = set()
    for number, bar in enumerate(bars_of(found)):
        page.hover(f'[data-bar="{number}"]')
        assert described(page) == said_of(bar, found)
        seen.add(bar["phase"])
    assert seen == set(PHASES)
    assert page.locator(".chosen").count() == 1


@pytest.mark.browser
def test_a_step_of_the_list_fills_the_view_and_the_list_says_what_is_shown(opened):
    found = a_timeline(steps=4)
    page = opened(found)
    for step in timeline_picture.steps_of(found):
        page.get_by_label("fill the view with a step").select_option(f"step {step['step']}")
        length = step["end_ms"] - step["start_ms"]
        assert near(visible(page), [step["start_ms"], step["end_ms"], length])
        settle(page)
        bars = page.locator("[data-bar]").all()
        numbers = {int(bar.get_attribute("data-bar")) for bar in bars}
        own = {i for i, bar in enumerate(bars_of(found)) if bar["step"] == step["step"]}
        assert numbers == own, "only what is visible is drawn"
    page.click("#in")
    assert page.input_value("#step") == "part"
    page.select_option("#step", "whole")
    assert near(visible(page)[:2], list(timeline_picture.whole_of(found)))
    page.select_option("#step", "4")
    page.click("#whole")
    assert page.input_value("#step") == "whole"


@pytest.mark.browser
def test_all_is_done_with_keys_too(opened):
    found = a_timeline()
    page, bars = opened(found), bars_of(found)
    start, end = timeline_picture.whole_of(found)
    quarter = (end - start) / 4
    page.focus("#lanes")
    page.keyboard.press("+")
    assert near(visible(page), [start + quarter, end - quarter, 2 * quarter])
    page.keyboard.press("ArrowRight")
    assert near(visible(page), [start + 1.5 * quarter, end - 0.5 * quarter, 2 * quarter])
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("-")
    assert near(visible(page), [start, end, 4 * quarter])
    settle(page)
    page.keyboard.press("Enter")
    assert described(page) == said_of(bars[0], found)
    for number in range(1, 15):
        page.keyboard.press("ArrowRight")
        assert described(page) == said_of(bars[number], found)
    page.keyboard.press("ArrowRight")
    assert described(page) == said_of(bars[14], found), "it was the lane's last"
    page.keyboard.press("ArrowDown")
    assert described(page)["phase"] == "all-reduce" and described(page)["rank"] == "0"
    page.keyboard.press("ArrowDown")
    assert described(page)["rank"] == "1"
    page.keyboard.press("+")
    page.keyboard.press("+")
    here = page.evaluate("document.activeElement.dataset.bar")
    middle = (bars[int(here)]["start_ms"] + bars[int(here)]["end_ms"]) / 2
    assert visible(page)[0] < middle < visible(page)[1], "a chosen bar stays where it is"
    for _ in range(10):
        page.keyboard.press("ArrowLeft")
    bar = bars[int(page.evaluate("document.activeElement.dataset.bar"))]
    assert visible(page)[0] <= bar["start_ms"] and bar["end_ms"] <= visible(page)[1]
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "lanes"
    page.keyboard.press("0")
    assert near(visible(page), [start, end, 4 * quarter])


@pytest.mark.browser
def test_the_wheel_zooms_where_it_points_and_a_drag_moves(opened):
    page = opened(a_timeline())
    bar = page.locator('[data-bar="7"]')
    bar.hover()
    x = bar.bounding_box()["x"] + bar.bounding_box()["width"] / 2
    before = visible(page)[2]
    page.mouse.wheel(0, -300)
    page.wait_for_function("document.querySelector('#step').value === 'part'")
    settle(page)
    box = bar.bounding_box()
    assert visible(page)[2] < before
    assert abs(box["x"] + box["width"] / 2 - x) < 1, "what it points at stays there"
    first, _, length = visible(page)
    scale = length / page.evaluate("place.right - place.left")
    y = box["y"] + 5
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 60, y, steps=5)
    page.mouse.move(x - 100, y, steps=5)
    page.mouse.up()
    assert near(visible(page), [first + 100 * scale, first + 100 * scale + length, length])
    page.mouse.move(x, y, steps=3)
    assert near(visible(page)[0], first + 100 * scale), "it was let go"
    for _ in range(20):
        page.mouse.wheel(0, 300)
    page.wait_for_function("document.querySelector('#step').value === 'whole'")


@pytest.mark.browser
def test_on_a_phone_nothing_is_wider_than_the_screen_and_fingers_zoom(opened, chromium):
    found = a_timeline(late_ms=20.0, sweep=True, name="a" * 300, model="m" * 300)
    page = opened(found, width=390)
    width = "document.documentElement.scrollWidth"
    assert page.evaluate(width) <= 390
    session = chromium.new_cdp_session(page)
    session.send("Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 2})
    page.locator("#lanes").scroll_into_view_if_needed()

    def touch(kind, *points):
        points = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(points)]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    box = page.locator('[data-bar="2"]').bounding_box()
    at = (box["x"] + box["width"] / 2, box["y"] + 8)
    touch("touchStart", at)
    touch("touchEnd")
    assert described(page) == said_of(bars_of(found)[2], found)
    assert page.evaluate(width) <= 390
    y = page.locator("#lanes").bounding_box()["y"] + 80
    length = visible(page)[2]
    touch("touchStart", (150, y), (250, y))
    for step in range(1, 11):
        touch("touchMove", (150 - 5 * step, y), (250 + 5 * step, y))
    touch("touchEnd")
    assert visible(page)[2] == pytest.approx(length / 2, rel=0.02)
    first = visible(page)[0]
    settle(page)
    touch("touchStart", (300, y))
    for step in range(1, 11):
        touch("touchMove", (300 - 10 * step, y))
    touch("touchEnd")
    assert visible(page)[0] > first


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
def test_ticks_stay_apart_and_in_the_picture_at_every_zoom(opened, width):
    page = opened(a_timeline(), width)
    for _ in range(14):
        settle(page)
        boxes = [tick.bounding_box() for tick in page.locator("#lanes .tick").all()]
        assert 2 <= len(boxes) <= width / 64 + 1
        for one, other in zip(boxes, boxes[1:], strict=False):
            assert one["x"] + one["width"] + 4 < other["x"]
        assert 0 <= boxes[0]["x"] and boxes[-1]["x"] + boxes[-1]["width"] <= width
        page.click("#in")


@pytest.mark.browser
def test_what_is_said_of_a_bar_never_moves_the_lanes_away_from_the_pointer(opened):
    page = opened(a_timeline(name="a" * 500), width=390)
    page.locator("#lanes").scroll_into_view_if_needed()
    before = page.locator("#lanes").bounding_box()
    numbers = [bar.get_attribute("data-bar") for bar in page.locator("[data-bar]").all()]
    sizes = set()
    for number in numbers[1:2] + numbers[-1:]:
        page.evaluate("number => choose(bars[number])", number)
        sizes.add(page.locator("#detail").bounding_box()["height"])
        assert page.locator("#lanes").bounding_box() == before
    assert len(sizes) == 2


@pytest.mark.browser
def test_what_is_planted_in_a_name_stays_text(opened):
    found = a_timeline(model=PLANTED, name=PLANTED)
    page = opened(found)
    number = next(i for i, bar in enumerate(bars_of(found)) if bar["bytes"] is not None)
    page.hover(f'[data-bar="{number}"]')
    assert described(page)["name"] == PLANTED
    assert PLANTED in page.inner_text("p.soft >> nth=0")
    assert page.title() == timeline_page.TITLE
    assert page.locator("img").count() == 0


@pytest.mark.browser
def test_of_many_thousand_bars_only_those_are_drawn_that_can_be_seen(opened):
    found = a_timeline(steps=2000)
    page = opened(found)
    total, pixels = len(bars_of(found)), page.evaluate("place.right - place.left")
    rows = sum(lane["rows"] for lane in timeline_picture.lanes_of(found))
    drawn = page.locator("[data-bar]").count()
    assert total == 32_000 and 1000 < drawn <= rows * (pixels + 1)
    page.select_option("#step", "1000")
    settle(page)
    numbers = [int(bar.get_attribute("data-bar")) for bar in page.locator("[data-bar]").all()]
    own = {i for i, bar in enumerate(bars_of(found)) if bar["step"] == 1000}
    assert own <= set(numbers) and len(numbers) < 2 * len(own)


@pytest.mark.browser
def test_the_page_of_a_real_run_shows_what_its_json_has(start, open_page, tmp_path):
    numbers, picture = tmp_path / "numbers.json", tmp_path / "lanes.svg"
    result = start(
        ["accel-demo", "timeline", "--quick", "--model", "small_cnn"]
        + ["--output", tmp_path / "out", "--json", numbers, "--plot", picture]
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(numbers.read_text())
    assert (found["processes"], found["backend"], len(found["ranks"])) == (2, "gloo", 2)
    page, bars = open_page(tmp_path / "out" / "timeline.html"), bars_of(found)
    page.locator("[data-bar]").first.wait_for()
    step = found["ranks"][0]["steps"][1]["step"]
    for rank in (0, 1):
        own = [bar for bar in bars if (bar["rank"], bar["step"]) == (rank, step)]
        for phase in ("forward", "backward", "optimizer", "all-reduce"):
            bar = max(
                (bar for bar in own if bar["phase"] == phase),
                key=lambda bar: bar["end_ms"] - bar["start_ms"],
            )
            page.select_option("#step", str(step))
            page.evaluate("([from, to]) => show(from, to)", [bar["start_ms"], bar["end_ms"]])
            settle(page)
            page.hover(f'[data-bar="{bars.index(bar)}"]')
            assert described(page) == said_of(bar, found)
    assert {f"step {step}", "communication", "backward"} <= words_of(picture)
