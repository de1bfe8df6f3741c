"""Makes plots and a readable summary of the raw results: report.py FOLDER, with e2e.json and scale.json in it."""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

COLOURS = {"plain": "#7f7f7f", "direct": "#c7c7c7", "filter": "#1f77b4", "filter/worker": "#9ecae1", "peer": "#ff7f0e"}
LABELS = {
    "keys": "cached keys",
    "waiters": "callers waiting for one flight",
    "headers": "key headers",
    "workers": "Envoy workers, on one core",
}


def spread(values, digits=2):
    return f"{values['min']:.{digits}f} – **{values['median']:.{digits}f}** – {values['max']:.{digits}f}"


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def about(results):
    what = results["about"]
    modules = ", ".join(f"{module['name']} {module['bytes']:,} bytes" for module in what["modules"])
    return (
        f"{what['date']}, {what['cpu']}, {what['cores']} cores, {what['memory_gib']} GiB, Linux {what['kernel']}, "
        f"Envoy {what['envoy']}, {what['h2load']}, commit {what['commit']}; module: {modules}; "
        f"{results['rounds']} rounds of each candidate, in turn."
    )


def bars(results, path):
    """CPU time of each candidate as a share of plain Envoy's."""
    shown = [s for s in results["scenarios"] if any(c["name"] == "plain" for c in s["candidates"])]
    names = list(dict.fromkeys(c["name"] for s in shown for c in s["candidates"]))
    figure, axes = plt.subplots(figsize=(11, 4.5), layout="constrained")
    width = 0.8 / max(len(names), 1)
    for position, name in enumerate(names):
        xs, heights, below, above = [], [], [], []
        for index, scenario in enumerate(shown):
            cpu = {c["name"]: c["summary"]["cpu_us"] for c in scenario["candidates"]}
            if name not in cpu:
                continue
            base, own = cpu["plain"]["median"], cpu[name]
            xs.append(index + (position - (len(names) - 1) / 2) * width)
            heights.append(own["median"] / base)
            below.append((own["median"] - own["min"]) / base)
            above.append((own["max"] - own["median"]) / base)
        drawn = axes.bar(xs, heights, width, yerr=[below, above], capsize=2, label=name, color=COLOURS.get(name))
        axes.bar_label(drawn, fmt="%.2f", fontsize=7, label_type="center", color="white" if name != "direct" else "black")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(shown)), [s["name"] for s in shown], rotation=20, ha="right")
    axes.set_ylabel("CPU time per request ÷ plain Envoy's")
    axes.set_title("CPU time of the proxy (median of the rounds; lines: least and most)")
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def curves(results, path):
    """CPU time as something grows."""
    figure, grid = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    for axes, curve in zip(grid.flat, results["curves"]):
        for name in dict.fromkeys(c["name"] for p in curve["points"] for c in p["outcome"]["candidates"]):
            points = [
                (point["x"], candidate["summary"]["cpu_us"])
                for point in curve["points"]
                for candidate in point["outcome"]["candidates"]
                if candidate["name"] == name
            ]
            xs = [x for x, _ in points]
            colour = COLOURS.get(name)
            axes.plot(xs, [cpu["median"] for _, cpu in points], "o-", label=name, color=colour)
            low, high = [cpu["min"] for _, cpu in points], [cpu["max"] for _, cpu in points]
            axes.fill_between(xs, low, high, alpha=0.2, color=colour)
        if max(point["x"] for point in curve["points"]) > 100:
            axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.set_xlabel(LABELS.get(curve["name"], curve["name"]))
        axes.set_ylabel("CPU µs per request")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle("Cost per request as things grow (median; band: least and most)")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def scenario_text(scenario):
    burst = any(ratio["quantity"] == "excess" for ratio in scenario["ratios"])
    speed = ("ms to last answer", "milliseconds", 1) if burst else ("requests/s", "per_second", 0)
    rows = []
    for candidate in scenario["candidates"]:
        summary, rounds = candidate["summary"], candidate["rounds"]
        rows.append([
            candidate["name"],
            spread(summary["cpu_us"]),
            spread(summary[speed[1]], speed[2]),
            spread(summary["p50_ms"]),
            spread(summary["p99_ms"]),
            spread(summary["peak_rss_mib"], 0),
            f"{sum(r['backend_calls'] for r in rounds):,} / {sum(r['calls'] for r in rounds):,}",
        ])
    head = ["", "CPU µs/request", speed[0], "p50 ms", "p99 ms", "peak RSS MiB", "backend calls"]
    text = f"### {scenario['name']}\n{scenario['about']}\n\n{table(head, rows)}\n"
    for ratio in scenario["ratios"]:
        what = "CPU" if ratio["quantity"] == "cpu" else "time less the backend's"
        text += (
            f"\n- {ratio['of']} ÷ {ratio['to']}, {what}: **{ratio['of_medians']:.2f}** of medians, "
            f"{ratio['of_minima']:.2f} of the least, rounds {spread(ratio['of_rounds'])}"
        )
    return text + "\n"


def memory_text(memory):
    rows = [[m["candidate"], spread(m["spread"], 0)] for m in memory if m["spread"]]
    return (
        "### waiter-memory\n10,000 calls for one key wait for a backend that hangs. `held`: Envoy's own fault filter holds "
        f"them instead, which shows what a waiting call takes of Envoy itself; `held+slot`: with the Lua filter of the body slot "
        f"in the chain, of which each stream has an instance.\n\n{table(['', 'bytes per waiting call'], rows)}\n"
    )


def curve_text(curve):
    names = list(dict.fromkeys(c["name"] for p in curve["points"] for c in p["outcome"]["candidates"]))
    rows = []
    for point in curve["points"]:
        cpu = {c["name"]: c["summary"]["cpu_us"] for c in point["outcome"]["candidates"]}
        rss = dict(point["rss_mib"])
        rows.append([f"{point['x']:,}"] + [spread(cpu[name]) for name in names] + [f"{rss[name]:,.0f}" for name in names])
    head = [LABELS.get(curve["name"], curve["name"])]
    head += [f"{name}, CPU µs/request" for name in names] + [f"{name}, RSS MiB" for name in names]
    return f"### {curve['name']}\n{curve['about']}\n\n{table(head, rows)}\n"


def main(folder):
    text = [
        "# Results\n",
        "Made by `make bench-report`. Each figure is least – **median** – most of the rounds. The proxy has one core for "
        "itself, client and backend share another; CPU time is the proxy's alone, as the system tells it. `plain` is the "
        "shipped configuration without the filter, `direct` the same with Envoy's own `direct_response` of the same bytes.\n",
    ]
    e2e, scale = folder / "e2e.json", folder / "scale.json"
    if e2e.exists():
        results = json.loads(e2e.read_text())
        bars(results, folder / "e2e.png")
        text += ["## Side by side\n", about(results) + " Raw: [e2e.json](e2e.json).\n", "![CPU time](e2e.png)\n"]
        text += [scenario_text(scenario) for scenario in results["scenarios"]]
        if results["memory"]:
            text.append(memory_text(results["memory"]))
    if scale.exists():
        results = json.loads(scale.read_text())
        curves(results, folder / "scale.png")
        text += ["## Scale\n", about(results) + " Raw: [scale.json](scale.json).\n", "![Scale](scale.png)\n"]
        text += [curve_text(curve) for curve in results["curves"]]
    (folder / "README.md").write_text("\n".join(text))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
