"use strict";
// The page of a comparison. Everything shown was computed before; here it is only drawn.
(() => {
  const { element, color } = page;
  const { card, key } = report;
  const data = page.data();
  const TIME_HUE = "hue-1";
  const HUES = ["hue-1", "hue-2", "hue-9"]; // allocated, reserved, peak
  const ROOM = 0.06; // of the span, beside the outermost figure
  const ROW = 54; // pixels a variant
  const AXES = 64;
  const NARROW = 640;
  const USUAL = 0.95; // of the steps lie in the chart, and what is not much longer
  const WIDER = 1.25;
  const NAME = { wide: 26, narrow: 12 }; // characters of a variant's name
  const CHARACTER = 7.4; // pixels, of the axis's font

  const shortened = (name, most) => (name.length > most ? `${name.slice(0, most - 1)}…` : name);

  // A chart with a row for each variant: `paint(context, row, across, middle, half)` draws one, with `across`
  // from a value to pixels, `middle` of the row and `half` of its height.
  function rows({ label, low, high, format, splits, paint }) {
    const board = element("div", { class: "chart", role: "img", "aria-label": label });
    let chart = null;
    const names = data.variants.map((variant) => variant.name);
    function draw(width) {
      if (chart) chart.destroy();
      const most = width < NARROW ? NAME.narrow : NAME.wide;
      const shown = names.map((name) => shortened(name, most));
      const text = {
        stroke: () => color("ink-2"),
        font: "12px system-ui, sans-serif",
        grid: { stroke: () => color("grid"), width: 1 },
        ticks: { show: false },
      };
      chart = new uPlot(
        {
          width,
          height: ROW * names.length + AXES,
          padding: [8, 28, 0, 0],
          legend: { show: false },
          cursor: { show: false },
          scales: {
            x: { time: false, range: () => [low, high] },
            y: { dir: -1, range: () => [-0.5, names.length - 0.5] },
          },
          axes: [
            {
              ...text,
              size: 34,
              space: width < NARROW ? 70 : 100,
              splits,
              values: (self, ticks) => format(ticks),
            },
            {
              ...text,
              grid: { show: false },
              size: 14 + CHARACTER * Math.max(...shown.map((name) => name.length)),
              splits: () => names.map((_, index) => index),
              values: () => shown,
            },
          ],
          series: [{}, { show: false }],
          hooks: {
            draw: [
              (self) => {
                const across = (value) => self.valToPos(value, "x", true);
                self.ctx.save();
                self.ctx.textAlign = "left";
                self.ctx.textBaseline = "middle";
                data.variants.forEach((variant, index) => {
                  const half = (ROW / 2) * devicePixelRatio;
                  paint(self.ctx, variant, across, self.valToPos(index, "y", true), half);
                });
                self.ctx.restore();
              },
            ],
          },
        },
        [
          [low, high],
          [null, null],
        ],
        board,
      );
    }
    const again = page.drawing(board, draw);
    return [board, () => again(true)];
  }

  // Every step a dot, in a lane a trial; the median a line, its interval a band.
  function times() {
    const timeOf = (variant) => variant.cells[0][0];
    const measured = data.variants.filter((variant) => timeOf(variant) !== null);
    if (!measured.length) return null;
    const steps = measured.flatMap((variant) => variant.steps.flat()).sort((a, b) => a - b);
    const least = steps[0];
    // A few steps that took many times as long would press all others into the corner.
    const usual = steps[Math.floor(USUAL * (steps.length - 1))] * WIDER;
    const bands = measured.map((variant) => (variant.interval ? variant.interval[1] : timeOf(variant)));
    const most = Math.min(steps[steps.length - 1], Math.max(usual, ...bands));
    const beyond = steps.filter((step) => step > most).length;
    const room = (most - least || most) * ROOM;
    const low = Math.max(0, least - room);
    const medians = measured.map(({ name, cells }) => `${name} ${cells[0][1]}`);
    const [board, redraw] = rows({
      label: `Time of every step; medians: ${medians.join(", ")}.`,
      low,
      high: most + room,
      format: (ticks) => ticks.map((tick) => fine(tick, ticks)),
      paint: (context, variant, across, middle, half) => {
        if (timeOf(variant) === null) return missing(context, across(low), middle);
        const ratio = devicePixelRatio;
        const tall = half * 0.8;
        if (variant.interval) {
          const [from, to] = variant.interval.map(across);
          context.fillStyle = color("wash-1");
          context.fillRect(from, middle - tall, Math.max(ratio, to - from), 2 * tall);
        }
        const lane = (2 * tall) / variant.steps.length;
        context.font = `${12 * ratio}px system-ui, sans-serif`;
        context.fillStyle = color(TIME_HUE);
        variant.steps.forEach((measurements, trial) => {
          const y = middle - tall + lane * (trial + 0.5);
          context.globalAlpha = 0.55;
          for (const step of measurements) {
            if (step > most) {
              context.fillText("▸", across(most) + 4 * ratio, y);
              continue;
            }
            context.beginPath();
            context.arc(across(step), y, 2.4 * ratio, 0, 2 * Math.PI);
            context.fill();
          }
          context.globalAlpha = 1;
        });
        context.fillStyle = color("ink");
        context.fillRect(across(timeOf(variant)) - ratio, middle - tall, 2 * ratio, 2 * tall);
        return undefined;
      },
    });
    const place = card(
      "Time per step",
      "each dot a step after the warm-up, each lane a trial",
      board,
      element(
        "ul",
        { class: "legend" },
        key({ name: "a step", color: TIME_HUE }),
        key({ name: "median of the trials", color: "ink" }, "line"),
        key({ name: "interval of the median", color: "wash-1" }),
        beyond ? element("li", {}, `▸ ${page.counted(beyond, "step")} beyond the chart`) : null,
      ),
    );
    return [place, redraw];
  }

  // As page.seconds, with the decimals that tell the ticks apart.
  function fine(tick, ticks) {
    const apart = ticks.length > 1 ? ticks[1] - ticks[0] : tick;
    const [factor, unit] = ticks[ticks.length - 1] < 1 ? [1000, "ms"] : [1, "s"];
    const step = apart * factor;
    let decimals = 0;
    while (decimals < 6 && Math.abs(Number(step.toFixed(decimals)) - step) > step / 1000) decimals += 1;
    return `${(tick * factor).toFixed(decimals)} ${unit}`;
  }

  function missing(context, left, middle) {
    context.fillStyle = color("ink-3");
    context.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
    context.fillText("no figures", left + 6 * devicePixelRatio, middle);
  }

  // Three bars a variant, from 0; where ranks differ a whisker from the lowest to the highest.
  function memory() {
    const most = Math.max(...data.variants.flatMap(({ cells }) => cells.slice(2).map(([value]) => value || 0)));
    if (most === 0) return null;
    const [board, redraw] = rows({
      label: `Memory at the mark ${data.mark}; the figures are in the table.`,
      low: 0,
      high: most * (1 + 3 * ROOM),
      splits: byteSplits,
      format: (ticks) => ticks.map((tick) => (tick === 0 ? "0" : tickBytes(tick, ticks[1] - ticks[0]))),
      paint: (context, variant, across, middle, half) => {
        const tall = half * 0.8;
        const bar = (2 * tall) / HUES.length;
        const ratio = devicePixelRatio;
        context.font = `${11 * ratio}px system-ui, sans-serif`;
        variant.cells.slice(2).forEach(([value, words], index) => {
          if (value === null) return;
          const top = middle - tall + bar * index;
          context.fillStyle = color(HUES[index]);
          context.fillRect(across(0), top + ratio, across(value) - across(0), bar - 2 * ratio);
          const ranks = variant.ranks[index];
          if (ranks && ranks[0] < ranks[1]) {
            context.fillStyle = color("ink");
            const [from, to] = ranks.map(across);
            context.fillRect(from, top + bar / 2 - ratio / 2, to - from, ratio);
            for (const end of [from, to])
              context.fillRect(end - ratio / 2, top + 2 * ratio, ratio, bar - 4 * ratio);
          }
          context.fillStyle = color("ink-2");
          context.fillText(words, across(value) + 5 * ratio, top + bar / 2);
        });
      },
    });
    const place = card(
      "Memory",
      `at the mark ${data.mark}, highest after the warm-up; whiskers: ranks`,
      board,
      element(
        "ul",
        { class: "legend" },
        ...data.columns.slice(2).map((name, index) => key({ name, color: HUES[index] })),
      ),
    );
    return [place, redraw];
  }

  const two = ([value, below]) =>
    element("span", {}, value, below ? element("span", { class: "quiet small below" }, below) : null);

  function variants() {
    const order = new Map(data.variants.map((variant, index) => [variant, index]));
    const figure = (label, index) => ({
      label,
      right: true,
      value: (row) => row.cells[index][0],
      cell: (row) => two(row.cells[index].slice(1)),
    });
    return card(
      "Variants",
      data.legend,
      table({
        caption: "variant",
        rows: data.variants,
        sort: 0,
        folds: true,
        text: (row) => row.name,
        columns: [
          {
            label: "variant",
            value: (row) => -order.get(row), // in the file's order to begin with
            cell: (row) => two([row.name, `${row.trials}${row.baseline ? ", baseline" : ""}`]),
          },
          ...data.columns.map(figure),
        ],
      }),
    );
  }

  function targets() {
    if (!data.targets.length) return null;
    return card(
      "Targets",
      null,
      ...data.targets.map(({ level, verdict, words, result }) =>
        element(
          "div",
          { class: `target level-${level}` },
          element("span", { class: "word" }, verdict),
          element("div", {}, element("div", {}, words), element("div", { class: "quiet small" }, result)),
        ),
      ),
    );
  }

  report.show(data, [
    report.verdict(data.verdict),
    variants(),
    targets(),
    times(),
    memory(),
    ...data.values.map(({ name, rows: read }) => card(name, null, report.facts(read))),
    ...Object.entries(data.remarks).map(([title, lines]) => report.notes(title, lines)),
  ]);
})();
