"""Test that the lanes of a timeline show the measured values, in the picture and on the page."""

import json
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgba

from accel_demo.lab.timeline import result as results
from accel_demo.lab.timeline.page import TITLE, data_of, write_timeline_page
from accel_demo.lab.timeline.picture import COLOR_OF, figure_of
from accel_demo.lab.timeline.result import Bar, BucketTrial, MeasuredFinding, place_in_rows
from accel_demo.lab.timeline.straggler import STEPS_NEEDED
from accel_demo.lab.timeline.tables import verdict
from accel_demo.show import save
from accel_demo.wording import counted
from tests.lab.contrast import LOWEST_OF_LINES, check_both_themes, visible_lines

PHASES = ["data wait", "forward", "backward", "rank wait", "message wait", "optimizer", "other"]
SIZES = [802_816, 401_408, 1_234_567]  # of the buckets, in bytes
PLANTED = "</script><script>document.title = 'planted'</script><img src=x onerror=alert(1)>"


def a_timeline(ranks=2, steps=3, late_ms=0.0, sweep=False, name="allreduce", model="small_cnn"):
    """Return a made-up result in which the last rank starts each forward `late_ms` late."""
    text = "rank 1 is slow: it computes 20 ms longer than the others in each step, in forward"
    return results.TimelineResult(
        processes=ranks,
        backend="gloo",
        device="cpu",
        description=f"{counted(ranks, 'connected process')} on cpu (gloo): {model}",
        settings={},
        bucket_bytes=[SIZES],
        ranks=[a_rank(rank, rank == ranks - 1, steps, late_ms, name) for rank in range(ranks)],
        straggler=ranks - 1 if late_ms else None,
        findings=[MeasuredFinding("computes longer", 1, text)] if late_ms else [],
        sweep=[
            BucketTrial(
                size, buckets, 12.0 + buckets, 12.0 - hidden, hidden / 24, 20.0, 50 - hidden, []
            )
            for size, buckets, hidden in ((0.5, 5, 10.0), (25.0, 1, 0.5), (0.05, 12, 2.0))
            if sweep
        ],
    )


def a_rank(rank, is_last, step_count, late_ms, name):
    delay, computing, sending, steps = late_ms if is_last else 0.0, [], [], []
    phases = {"data wait": 2.5 + delay, "forward": 11.25, "backward": 17.5}
    phases |= {"rank wait": 1.0 + late_ms - delay, "message wait": 2.125}
    phases |= {"optimizer": 5.0, "other": 0.5}
    length = sum(phases.values())
    for step in range(3, 3 + step_count):
        at = start = (step - 3) * (41.0 + late_ms) + 0.1 * rank
        for phase, phase_ms in phases.items():
            computing.append(Bar(phase, phase, step, at, at + phase_ms))
            at += phase_ms
        waiting = computing[-4].start_ms
        ends = (-4.0, -0.5, phases["rank wait"] + phases["message wait"])
        for before, after, size in zip((9.0, 3.5, 1.5), ends, SIZES, strict=True):
            sending.append(Bar("collective", name, step, waiting - before, waiting + after, size))
        steps.append(results.ProfiledStep(step, start, at, length, phases, 12.125, 9.0, 3.125, 1))
    times = {"all_reduce_ms": 12.125, "exposed_ms": 3.125, "hidden_share": 9 / 12.125}
    times |= {"late_ms": delay, "slower_ms": {"forward": delay}}
    lanes = {"activity": place_in_rows(computing), "collectives": place_in_rows(sending)}
    return results.RankTimeline(rank, 0.0, length, phases, **times, steps=steps, lanes=lanes)


def bars_of(result):
    """Return a (rank, bar) pair for every bar, in the page's order: by lane, then by start."""
    return [
        (rank.rank, bar)
        for rank in result.ranks
        for lane in (rank.lanes["activity"], rank.lanes["collectives"])
        for bar in sorted(lane, key=lambda bar: (bar.start_ms, -bar.end_ms))
    ]


def words_of(picture):
    """Return a picture's texts from its comments, because matplotlib draws texts as shapes."""
    return set(re.findall(r"<!-- (.*?) -->", picture.read_text()))


def test_the_picture_names_ranks_steps_and_phases_and_the_slow_rank(tmp_path):
    file = tmp_path / "lanes.svg"
    save(figure_of(a_timeline(late_ms=20.0)), file)
    words = words_of(file)
    assert {"step 3", "step 4", "step 5", "collectives", "main thread", *PHASES} <= words
    assert {"rank 0", "rank 1 (slow)"} <= words
    assert "rank 1 is slow: it computes 20 ms longer than the others in each step, in" in words
    assert not any("bucket_cap_mb of DDP" in word for word in words)
    save(figure_of(a_timeline(steps=STEPS_NEEDED)), file)
    assert "no rank is slower than the others in each step" in words_of(file)
    assert not any("slow)" in word for word in words_of(file))


def test_every_bar_in_the_picture_has_its_measured_times_and_its_phases_color():
    result = a_timeline(ranks=3, late_ms=4.0)
    drawn, heights = [], []
    for row in figure_of(result).axes[0].collections:
        for path in row.get_paths():
            box = path.get_extents()
            drawn.append((round(box.x0, 6), round(box.x1, 6), tuple(row.get_facecolor()[0])))
            heights.append((box.y0, box.y1))
    colors = {phase: to_rgba(color) for phase, color in COLOR_OF.items()}
    bars = [bar for _, bar in bars_of(result)]
    expected = [(round(b.start_ms, 6), round(b.end_ms, 6), colors[b.phase]) for b in bars]
    assert sorted(drawn) == sorted(expected) and len(set(colors.values())) == len(PHASES) + 1
    boxes = list(zip(drawn, heights, strict=True))
    for (first, high), (second, low) in ((a, b) for a in boxes for b in boxes if a != b):
        apart = first[1] <= second[0] + 1e-5 or second[1] <= first[0] + 1e-5
        assert apart or high[1] <= low[0] or low[1] <= high[0], "two bars overlap"


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=30))
def test_overlapping_bars_are_in_different_rows_and_no_row_is_wasted(spans):
    bars = [Bar("collective", "allreduce", 3, start, start + length) for start, length in spans]
    lane = place_in_rows(bars)
    assert results.row_count([]) == 1
    assert Counter(replace(bar, row=0) for bar in lane) == Counter(bars)
    at_once = [sum(bar.start_ms <= moment < bar.end_ms for bar in lane) for moment in range(80)]
    assert results.row_count(lane) == max(1, *at_once)
    for row in range(results.row_count(lane)):
        in_row = [bar for bar in lane if bar.row == row]
        for bar, next_bar in zip(in_row, in_row[1:], strict=False):
            assert bar.end_ms <= next_bar.start_ms


def test_the_sweep_is_plotted_against_the_bucket_size():
    result = a_timeline(sweep=True)
    trials = sorted(result.sweep, key=lambda trial: trial.bucket_mb)
    shares, lengths = figure_of(result).axes[2:]
    for axes, values in (
        (shares, [100 * trial.hidden_share for trial in trials]),
        (lengths, [trial.step_ms for trial in trials]),
    ):
        (line,) = axes.lines
        assert list(line.get_xdata()) == [0.05, 0.5, 25.0]
        assert list(line.get_ydata()) == values
        assert axes.get_xscale() == "log"
        assert [text.get_text() for text in axes.get_xticklabels()] == ["0.05", "0.5", "25"]
    assert len(figure_of(a_timeline()).axes) == 2


def rows_of(page):
    rows = re.findall("<tr>(.*?)</tr>", page)
    return [re.findall("<t[dh][^>]*>(.*?)</t[dh]>", row) for row in rows]


def test_without_a_script_the_page_has_the_tables_and_names_the_slow_rank(tmp_path):
    file = tmp_path / "timeline.html"
    write_timeline_page(a_timeline(late_ms=20.0, sweep=True), file)
    page = file.read_text()
    assert "rank 1 is slow: it computes 20 ms longer than the others in each step" in page
    assert "no rank is slower than the others in each step" not in page
    assert "2 connected processes on cpu (gloo): small_cnn" in page
    head, *ranks, sweep_head, first, second, last = rows_of(page)
    assert head == ["rank", *PHASES, "step", "late"]
    assert [row[0] for row in ranks] == ["0", "1"]
    assert ranks[1][1:3] == ["22.5", "11.2"] and ranks[1][-2:] == ["59.9", "20.0"]
    assert "rank 1: the all-reduce takes 12.1 ms, 74% of it hidden under backward" in page
    assert (sweep_head[0], sweep_head[3]) == ("bucket MiB", "exposed ms")
    assert [row[0] for row in (first, second, last)] == ["0.5", "25", "0.05"], "in the given order"
    assert last == ["0.05", "12", "24.0", "10.0", "8", "20.0", "48.0", "needs 5 repeats"]
    write_timeline_page(a_timeline(steps=STEPS_NEEDED), file)
    page = file.read_text()
    assert "no rank is slower than the others in each step" in page
    assert "is slow:" not in page and len(rows_of(page)) == 3


def test_the_page_contains_every_bar_and_its_share_of_the_step():
    result = a_timeline(late_ms=20.0)
    data, expected = data_of(result), bars_of(result)
    assert len(data["bars"]) == len(expected) == 2 * 3 * 10
    for bar, (rank, measured) in zip(data["bars"], expected, strict=True):
        length = measured.end_ms - measured.start_ms
        assert (bar["start_ms"], bar["end_ms"]) == (measured.start_ms, measured.end_ms)
        assert bar["rank"] == rank
        assert bar["share"] == pytest.approx(length / 59.875)
    assert data["whole"] == results.whole_span(result.ranks)
    assert [lane["is_slow"] for lane in data["lanes"]] == [False, False, True, True]


def test_a_run_on_one_process_has_an_empty_lane_of_collectives(tmp_path):
    result = a_timeline(ranks=1)
    (rank,) = result.ranks
    rank = replace(rank, lanes={**rank.lanes, "collectives": []})
    result = replace(result, ranks=[rank], bucket_bytes=[[]])
    save(figure_of(result), tmp_path / "lanes.svg")
    write_timeline_page(result, tmp_path / "lanes.html")
    text = "1 connected process on cpu (gloo): small_cnn</p>"
    assert text in (tmp_path / "lanes.html").read_text()
    assert len(data_of(result)["lanes"]) == 2
    assert verdict(result) == ["a single process waits for no other"]


def test_the_verdict_does_not_pass_over_a_rank_that_is_late():
    result = a_timeline(steps=STEPS_NEEDED, late_ms=20.0)
    [text] = verdict(replace(result, findings=[], straggler=None))
    assert (
        "no rank is slower at the same operator in each step, but rank 1 is late by 20 ms" in text
    )
    result = a_timeline(steps=STEPS_NEEDED, late_ms=2.0)
    [text] = verdict(replace(result, findings=[], straggler=None))
    assert text == "no rank is slower than the others in each step"


def test_the_page_has_no_handler_in_its_markup_and_escapes_every_name(tmp_path):
    file = tmp_path / "timeline.html"
    write_timeline_page(a_timeline(model=PLANTED, name=PLANTED), file)
    page = file.read_text()
    assert PLANTED not in page and "<img" not in page and page.count("</script>") == 2
    tags = re.findall(r"<[a-z][^>]*>", page.split("<script")[0])
    assert not any(re.search(r"\son\w+\s*=", tag) for tag in tags)
    assert all("src=" not in tag for tag in tags)


# Tests in a browser


@pytest.fixture
def opened(open_page, tmp_path):
    """`opened(result, width)` opens the page of a result, and returns it once bars are drawn."""

    def opened(result, width=1280):
        file = tmp_path / "timeline.html"
        write_timeline_page(result, file)
        page = open_page(file, width)
        page.locator("[data-bar]").first.wait_for()
        return page

    return opened


def visible(page):
    """Return the start, end and length of the visible time in ms, as `#range` shows them."""
    return [float(number) for number in re.findall(r"\d+\.\d+", page.inner_text("#range"))]


def drawn_bars(page):
    """Return the numbers of the bars that are drawn, in the page's order."""
    return [int(bar.get_attribute("data-bar")) for bar in page.locator("[data-bar]").all()]


def settle(page):
    """Wait until the browser has drawn the page."""
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def shown_description(page):
    """Return the page's description of the chosen bar."""
    parts = page.locator("#detail b").all()
    return {part.get_attribute("id").removeprefix("bar-"): part.inner_text() for part in parts}


def description(rank_and_bar, result):
    """Return the expected description of a bar."""
    rank, bar = rank_and_bar
    steps = result.ranks[rank].steps
    wall_ms = next(step.wall_ms for step in steps if step.number == bar.step)
    length = bar.end_ms - bar.start_ms
    parts = {"rank": str(rank), "phase": bar.phase, "start": f"{bar.start_ms:.3f} ms"}
    parts |= {"duration": f"{length:.3f} ms"}
    parts |= {"share": f"{100 * length / wall_ms:.1f} % of step {bar.step}"}
    parts |= {"name": bar.name} if bar.name != bar.phase else {}
    return parts | ({"bytes": f"{bar.bytes_sent:,}"} if bar.bytes_sent is not None else {})


def near(values, expected):
    return values == pytest.approx(expected, abs=0.002)  # the page rounds to 0.001


@pytest.mark.browser
def test_zooming_in_halves_the_visible_time_and_one_button_shows_the_whole_time(opened):
    result = a_timeline()
    page = opened(result)
    start, end = results.whole_span(result.ranks)
    whole, quarter = end - start, (end - start) / 4
    assert near(visible(page), [start, end, whole])
    page.get_by_role("button", name="zoom in, twice as large").click()
    assert near(visible(page), [start + quarter, end - quarter, whole / 2])
    page.get_by_role("button", name="zoom in, twice as large").click()
    assert near(visible(page), [start + 1.5 * quarter, end - 1.5 * quarter, whole / 4])
    page.get_by_role("button", name="move to later").click()
    assert near(visible(page), [start + 1.75 * quarter, end - 1.25 * quarter, whole / 4])
    page.get_by_role("button", name="move earlier").click()
    page.get_by_role("button", name="zoom out, half as large").click()
    assert near(visible(page), [start + quarter, end - quarter, whole / 2])
    page.get_by_role("button", name="show the whole time").click()
    assert near(visible(page), [start, end, whole])
    for _ in range(20):
        page.click("#in")
    assert visible(page)[2] == 0.02, "zooming in stops at 0.02 ms"
    for _ in range(20):
        page.click("#out")
    assert near(visible(page), [start, end, whole])


@pytest.mark.browser
def test_pointing_at_a_bar_shows_its_numbers(opened):
    result = a_timeline(late_ms=20.0)
    page = opened(result)
    seen = set()
    for number, bar in enumerate(bars_of(result)):
        page.hover(f'[data-bar="{number}"]')
        assert shown_description(page) == description(bar, result)
        seen.add(bar[1].phase)
    assert seen == {*PHASES, "collective"}
    assert page.locator(".chosen").count() == 1


@pytest.mark.browser
def test_a_step_chosen_from_the_list_fills_the_view_and_the_list_shows_the_visible_step(opened):
    result = a_timeline(steps=4)
    page = opened(result)
    for step, (start, end) in results.step_spans(result.ranks).items():
        page.get_by_label("zoom to one step").select_option(f"step {step}")
        assert near(visible(page), [start, end, end - start])
        settle(page)
        expected = {i for i, (_, bar) in enumerate(bars_of(result)) if bar.step == step}
        assert set(drawn_bars(page)) == expected, "only visible bars are drawn"
    page.click("#in")
    assert page.input_value("#step") == "part"
    page.select_option("#step", "whole")
    assert near(visible(page)[:2], list(results.whole_span(result.ranks)))
    page.select_option("#step", "4")
    page.click("#whole")
    assert page.input_value("#step") == "whole"


@pytest.mark.browser
def test_zooming_moving_and_choosing_bars_also_work_with_the_keyboard(opened):
    result = a_timeline()
    page, bars = opened(result), bars_of(result)
    start, end = results.whole_span(result.ranks)
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
    assert shown_description(page) == description(bars[0], result)
    last = 3 * len(PHASES) - 1  # of rank 0's first lane
    for number in range(1, last + 1):
        page.keyboard.press("ArrowRight")
        assert shown_description(page) == description(bars[number], result)
    page.keyboard.press("ArrowRight")
    assert shown_description(page) == description(bars[last], result), "there is none to the right"
    page.keyboard.press("ArrowDown")
    shown = shown_description(page)
    assert (shown["phase"], shown["rank"]) == ("collective", "0")
    page.keyboard.press("ArrowDown")
    assert shown_description(page)["rank"] == "1"
    page.keyboard.press("+")
    page.keyboard.press("+")
    _, bar = bars[int(page.evaluate("document.activeElement.dataset.bar"))]
    middle = (bar.start_ms + bar.end_ms) / 2
    assert visible(page)[0] < middle < visible(page)[1], "the chosen bar stays visible"
    for _ in range(10):
        page.keyboard.press("ArrowLeft")
    _, bar = bars[int(page.evaluate("document.activeElement.dataset.bar"))]
    assert visible(page)[0] <= bar.start_ms and bar.end_ms <= visible(page)[1]
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "lanes"
    page.keyboard.press("0")
    assert near(visible(page), [start, end, 4 * quarter])


@pytest.mark.browser
def test_the_wheel_zooms_at_the_pointer_and_dragging_moves_the_view(opened):
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
    assert abs(box["x"] + box["width"] / 2 - x) < 1, "the bar stays under the pointer"
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
    assert near(visible(page)[0], first + 100 * scale), "the view moves only while a button is down"
    for _ in range(20):
        page.mouse.wheel(0, 300)
    page.wait_for_function("document.querySelector('#step').value === 'whole'")


@pytest.mark.browser
def test_on_a_phone_nothing_is_wider_than_the_screen_and_two_fingers_zoom(opened, chromium):
    result = a_timeline(late_ms=20.0, sweep=True, name="a" * 300, model="m" * 300)
    page = opened(result, width=390)
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
    assert shown_description(page) == description(bars_of(result)[2], result)
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
def test_ticks_never_overlap_or_extend_beyond_the_page_at_any_zoom_level(opened, width):
    page = opened(a_timeline(), width)
    for _ in range(14):
        settle(page)
        boxes = [tick.bounding_box() for tick in page.locator("#lanes .tick").all()]
        assert 2 <= len(boxes) <= width / 64 + 1
        for left, right in zip(boxes, boxes[1:], strict=False):
            assert left["x"] + left["width"] + 4 < right["x"]
        assert 0 <= boxes[0]["x"] and boxes[-1]["x"] + boxes[-1]["width"] <= width
        page.click("#in")


@pytest.mark.browser
def test_the_description_of_a_bar_never_moves_the_lanes(opened):
    page = opened(a_timeline(name="a" * 500), width=390)
    page.locator("#lanes").scroll_into_view_if_needed()
    before = page.locator("#lanes").bounding_box()
    numbers, sizes = drawn_bars(page), set()
    for number in numbers[1:2] + numbers[-1:]:
        page.evaluate("number => choose(bars[number])", number)
        sizes.add(page.locator("#detail").bounding_box()["height"])
        assert page.locator("#lanes").bounding_box() == before
    assert len(sizes) == 2


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_readable_in_a_light_and_in_a_dark_theme(opened, width):
    page = opened(a_timeline(late_ms=20.0, sweep=True), width)
    page.hover('[data-bar="1"]')
    for _ in range(2):  # at first all lanes, then a part in which more bars have a label
        check_both_themes(page, {"text", "th", "td", "p", "button", "kbd", "b"})
        page.click("#in", click_count=2)
        settle(page)
    lines = visible_lines(page, "#lanes .edge")  # in the dark theme
    assert lines and min(line.contrast for line in lines) >= LOWEST_OF_LINES


@pytest.mark.browser
def test_html_in_a_name_is_shown_as_text(opened):
    result = a_timeline(model=PLANTED, name=PLANTED)
    page = opened(result)
    number = next(i for i, (_, bar) in enumerate(bars_of(result)) if bar.bytes_sent)
    page.hover(f'[data-bar="{number}"]')
    assert shown_description(page)["name"] == PLANTED
    assert PLANTED in page.inner_text("p.soft >> nth=0")
    assert page.title() == TITLE
    assert page.locator("img").count() == 0


@pytest.mark.browser
def test_only_the_visible_bars_of_a_long_run_are_drawn(opened):
    result = a_timeline(steps=2000)
    page = opened(result)
    total, pixels = len(bars_of(result)), page.evaluate("place.right - place.left")
    rows = sum(results.row_count(lane) for rank in result.ranks for lane in rank.lanes.values())
    drawn = page.locator("[data-bar]").count()
    assert total == 40_000 and 1000 < drawn <= rows * (pixels + 1)
    page.select_option("#step", "1000")
    settle(page)
    numbers = drawn_bars(page)
    expected = {i for i, (_, bar) in enumerate(bars_of(result)) if bar.step == 1000}
    assert expected <= set(numbers) and len(numbers) < 2 * len(expected)


@pytest.mark.browser
def test_the_page_of_a_real_run_shows_the_numbers_of_its_json(start, open_page, tmp_path):
    numbers, picture = tmp_path / "numbers.json", tmp_path / "lanes.svg"
    process = start(
        ["accel-demo", "timeline", "--quick", "--model", "small_cnn"]
        + ["--output", tmp_path / "out", "--json", numbers, "--plot", picture]
    )
    assert process.returncode == 0, process.stderr
    result = json.loads(numbers.read_text(), object_hook=lambda fields: SimpleNamespace(**fields))
    assert (result.processes, result.backend, len(result.ranks)) == (2, "gloo", 2)
    for rank in result.ranks:
        rank.lanes = vars(rank.lanes)
    page, bars = open_page(tmp_path / "out" / "timeline.html"), bars_of(result)
    page.locator("[data-bar]").first.wait_for()
    step = sorted({bar.step for _, bar in bars})[1]
    phases, longest = ("forward", "backward", "optimizer", "collective"), {}
    for number, (rank, bar) in enumerate(bars):
        if bar.step == step and bar.phase in phases:
            length = bar.end_ms - bar.start_ms
            longest[rank, bar.phase] = max(longest.get((rank, bar.phase), (0, 0)), (length, number))
    assert len(longest) == 8
    for _, number in longest.values():
        _, bar = bars[number]
        page.evaluate("([from, to]) => show(from, to)", [bar.start_ms, bar.end_ms])
        settle(page)
        page.hover(f'[data-bar="{number}"]')
        assert shown_description(page) == description(bars[number], result)
    assert {f"step {step}", "collectives", "backward"} <= words_of(picture)
