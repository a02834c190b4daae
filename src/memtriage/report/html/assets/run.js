"use strict";
// The page of a run. Everything shown was computed before; here it is only drawn.
(() => {
  const { element, bytes, whole, seconds, unpack } = page;
  const { card, code, facts, finding, prose } = report;
  const data = page.data();
  const root = document.documentElement;
  const THOUSANDTHS = 1000;
  const MOST_LINES = 16;
  const QUIET_BESIDE_BAND = 1; // ranks that nothing is said of, where a band shows them all
  const EDGES = ["lowest", "median", "highest"];
  const MOST_MARKS = 40;
  const SMALLEST_PART = 0.001; // of a bar
  const FEW = innerWidth < 640 ? 2 : 5; // options that fit on buttons
  const HUES = ["hue-1", "hue-2", "hue-5", "hue-3", "hue-10", "hue-9", "hue-12", "hue-11"];
  const LOUD = ["bad", "hue-8", "hue-7", "warn"];
  const CROWDED =
    "There are more marks than columns: each shows the mark with the highest figure, and the thin line the " +
    "lowest. Zoom in to see all.";
  let charts = 0;

  // Charts

  // A lane's columns as numbers; what was not read is null.
  function opened(lane) {
    if (!lane.opened) {
      const read = (column) => Array.from(unpack(column), (value) => (value < 0 ? null : value));
      lane.opened = {
        at: Array.from(unpack(lane.at), (value) => value / THOUSANDTHS),
        time: Array.from(unpack(lane.time), (value) => value / THOUSANDTHS),
        kind: Array.from(unpack(lane.kind)),
        values: Object.fromEntries(Object.entries(lane.values).map(([key, column]) => [key, read(column)])),
      };
    }
    return lane.opened;
  }

  const laneName = (lane) =>
    lane.rank === null ? lane.device : `rank ${lane.rank}${lane.label ? ` · ${lane.label}` : ""}`;

  // The rows of a lane that have marks of one name, or of any.
  function rowsAt(lane, kind) {
    const columns = opened(lane);
    const rows = columns.at.map((_, row) => row);
    return kind === null ? rows : rows.filter((row) => columns.kind[row] === kind);
  }

  // What the program itself named, evenly thinned, and a bad end.
  function marksOf(chart, lane) {
    const columns = opened(lane);
    const point = (row) => ({ step: columns.at[row], time: columns.time[row] });
    const own = rowsAt(lane, null).filter((row) => chart.own.includes(columns.kind[row]));
    const every = Math.ceil(own.length / MOST_MARKS);
    const last = columns.at.length - 1;
    return [
      ...(lane.end ? [{ at: point(last), label: lane.end, strong: true, color: "bad" }] : []),
      ...own
        .filter((_, place) => place % every === 0)
        .map((row) => ({ at: point(row), label: chart.names[columns.kind[row]], strong: false })),
    ];
  }

  // One rank: all its counters, or one of them.
  function single(chart, lane, kind, focus) {
    const columns = opened(lane);
    const rows = rowsAt(lane, kind);
    const pick = (values) => rows.map((row) => values[row]);
    const lines = chart.measures
      .filter((one) => focus === null || one.key === focus)
      .map((one) => ({ ...one, width: one.fill ? 2 : 1.5, values: pick(columns.values[one.key]) }));
    const kinds = pick(columns.kind);
    return {
      at: pick(columns.at),
      time: pick(columns.time),
      lines,
      marks: marksOf(chart, lane),
      bounds: lane.limit ? [{ value: lane.limit, label: `limit ${bytes(lane.limit)}` }] : [],
      describe: kind === null ? (row) => `mark ${chart.names[kinds[row]]}` : null,
    };
  }

  // Several ranks: one counter, each rank's last figure at every instant of any of them.
  function together(chart, kind, key) {
    const band = chart.band && kind === chart.usual ? chart.band : null;
    const shown = chart.lanes.slice(0, MOST_LINES);
    const beside = shown.filter((lane) => !lane.label).slice(0, QUIET_BESIDE_BAND);
    const lanes = band ? shown.filter((lane) => lane.label || beside.includes(lane)) : shown;
    const picked = lanes.map((lane) => rowsAt(lane, kind));
    const bandAt = band ? Array.from(unpack(band.at), (value) => value / THOUSANDTHS) : [];
    const at = [
      ...new Set([
        ...lanes.flatMap((lane, place) => picked[place].map((row) => opened(lane).at[row])),
        ...bandAt,
      ]),
    ].sort((left, right) => left - right);
    // A course ends with its rank.
    const carried = (places, values, end = Infinity) => {
      let next = 0;
      let value = null;
      return at.map((place) => {
        while (next < places.length && places[next] <= place) {
          value = values[next] ?? value;
          next += 1;
        }
        return place > end ? null : value;
      });
    };
    const column = (lane, rows, values, end) =>
      carried(
        rows.map((row) => opened(lane).at[row]),
        rows.map((row) => values[row]),
        end,
      );
    const loud = lanes.filter((lane) => lane.label);
    const quiet = lanes.filter((lane) => !lane.label);
    const shade = (lane) => {
      if (lane.label) return LOUD[loud.indexOf(lane) % LOUD.length];
      return quiet.length <= HUES.length ? HUES[quiet.indexOf(lane)] : "hue-other";
    };
    const lines = [...loud, ...quiet].map((lane) => ({
      name: laneName(lane),
      color: shade(lane),
      width: lane.label ? 3 : 1.5,
      values: column(lane, picked[lanes.indexOf(lane)], opened(lane).values[key], opened(lane).at.at(-1)),
    }));
    const bands = [];
    if (band) {
      const [low, middle, high] = band.values[key].map((edge, place) => ({
        name: `${EDGES[place]} of ${whole(band.ranks)} ranks`,
        color: EDGES[place] === "median" ? "ink-2" : "hue-past",
        width: EDGES[place] === "median" ? 2 : 1,
        values: carried(
          bandAt,
          Array.from(unpack(edge), (value) => (value < 0 ? null : value)),
        ),
      }));
      lines.push(high, middle, low);
      bands.push({ high, low, fill: "releasable" });
    }
    const clocks = lanes.map((lane, place) => column(lane, picked[place], opened(lane).time));
    const times = at.map((_, row) => Math.max(...clocks.map((clock) => clock[row] ?? 0)));
    const limits = [...new Set(lanes.map((lane) => lane.limit))];
    return {
      at,
      time: times,
      lines,
      bands,
      marks: [
        ...lanes.slice(1).flatMap((lane) => marksOf(chart, lane).filter((mark) => mark.strong)),
        ...marksOf(chart, lanes[0]),
      ],
      bounds:
        limits.length === 1 && limits[0] ? [{ value: limits[0], label: `limit ${bytes(limits[0])}` }] : [],
    };
  }

  function fill(board, chart, state) {
    const lane = chart.lanes.find((one) => String(one.rank) === state.rank);
    const drawn = lane
      ? single(chart, lane, state.kind, state.focus)
      : together(chart, state.kind, state.focus || chart.compared);
    board.replaceChildren();
    if (drawn.at.length < 2) {
      board.append(element("p", { class: "quiet" }, "Too few of these marks for a course."));
      return;
    }
    const crest = drawn.lines.find((line) => line.fill) || drawn.lines[0];
    const tops = crest.values.map((value) => value ?? -1);
    const many = lane ? "" : ` of ${chart.lanes.length} ranks`;
    timeline(board, {
      label: `${chart.title}${many}. ${data.verdict.word}: ${data.verdict.text}.`,
      axes: [
        {
          key: "step",
          label: "step",
          values: drawn.at,
          format: (value) => (Number.isInteger(value) ? whole(value) : ""),
          read: (value) => whole(Math.floor(value)),
        },
        { key: "time", label: "time", values: drawn.time, format: seconds },
      ],
      layers: [],
      lines: drawn.lines,
      bands: drawn.bands,
      bounds: drawn.bounds,
      marks: drawn.marks,
      describe: drawn.describe,
      fit: chart.of_interest && data.findings.length > 0,
      legendRow: tops.indexOf(tops.reduce((most, value) => Math.max(most, value), -1)),
      crest,
      crowded: CROWDED,
    });
    const remark = lane ? lane.left_out : null;
    if (remark) board.append(element("p", { class: "quiet small" }, remark));
    charts += 1;
    root.dataset.charts = String(charts);
  }

  function course(chart) {
    const several = chart.lanes.length > 1;
    const state = {
      rank: several ? "all" : String(chart.lanes[0].rank),
      kind: chart.usual,
      focus: chart.focus,
    };
    const board = element("div");
    const tools = element("div", { class: "tools" });
    const redraw = () => fill(board, chart, state);
    const chosen = (name, options, value, onChoose) =>
      (options.length > FEW ? page.select : page.choice)(name, options, value, onChoose);

    function offer() {
      const offers = [];
      if (several) {
        const ranks = chart.lanes.map((lane) => [String(lane.rank), laneName(lane)]);
        offers.push(
          page.select("ranks", [["all", "ranks compared"], ...ranks], state.rank, (key) => {
            state.rank = key;
            offer();
            redraw();
          }),
        );
      }
      if (chart.names.length > 1 && chart.often.length) {
        const kinds = chart.often.map((kind) => [String(kind), `at ${chart.names[kind]}`]);
        offers.push(
          chosen(
            "marks",
            [["all", "every mark"], ...kinds],
            state.kind === null ? "all" : String(state.kind),
            (key) => {
              state.kind = key === "all" ? null : Number(key);
              redraw();
            },
          ),
        );
      }
      const comparing = state.rank === "all";
      const counters = chart.measures.map((one) => [one.key, one.name]);
      if (counters.length > 1) {
        const every = comparing ? [] : [["all", "all counters"]];
        const now = state.focus || (comparing ? chart.compared : "all");
        offers.push(
          chosen("counters", [...every, ...counters], now, (key) => {
            state.focus = key === "all" ? null : key;
            redraw();
          }),
        );
      }
      tools.replaceChildren(...offers);
    }
    offer();
    const place = card(chart.title, "drag to zoom in, double click for the whole", tools, board);
    return [place, redraw];
  }

  // Ledgers

  function ledger(one) {
    const total = Math.max(1, one.total);
    const bar = element("div", {
      class: "stack",
      role: "img",
      "aria-label": `${one.device}: ${one.summary}`,
    });
    const share = (row) => `${((100 * row.bytes) / total).toFixed(1).replace("-0.0", "0.0")} %`;
    const largest = [...one.rows].sort((left, right) => right.bytes - left.bytes);
    for (const row of largest.filter((candidate) => candidate.bytes / total > SMALLEST_PART)) {
      const part = element("span", {
        class: row.hatched ? "hatched" : null,
        title: `${words(row)}: ${bytes(row.bytes)}`,
      });
      part.style.flexGrow = String(row.bytes);
      if (!row.hatched) part.style.background = `var(--${row.color})`;
      bar.append(part);
    }
    return element(
      "div",
      { class: "ledger" },
      element("h3", {}, one.device, " ", element("span", { class: "quiet" }, one.summary)),
      bar,
      table({
        caption: "row",
        rows: one.rows,
        sort: 1,
        folds: true,
        text: words,
        columns: [
          {
            label: "what",
            value: words,
            cell: (row) =>
              element(
                "div",
                { class: "entry" },
                report.swatch(row),
                element(
                  "span",
                  {},
                  row.row,
                  row.owner ? element("span", {}, " · ", element("strong", {}, row.owner)) : null,
                  row.detail ? element("span", { class: "detail" }, row.detail) : null,
                ),
              ),
          },
          { label: "bytes", right: true, value: (row) => row.bytes, cell: (row) => bytes(row.bytes) },
          { label: "share", right: true, value: (row) => row.bytes, cell: share },
        ],
      }),
      element("p", { class: "quiet small" }, `measured by ${one.source}`),
    );
  }

  const words = (row) => (row.owner ? `${row.row} · ${row.owner}` : row.row);

  function ledgers() {
    if (!data.ledgers.length) return null;
    const board = element("div", { class: "ledgers" });
    const show = (place) => board.replaceChildren(...data.ledgers[Number(place)].devices.map(ledger));
    const choice =
      data.ledgers.length > 1
        ? page.select(
            "ledger of",
            data.ledgers.map((one, place) => [String(place), one.rank]),
            "0",
            show,
          )
        : null;
    show(0);
    return card("Where the memory is", choice, board);
  }

  // How the ranks compare: what is said of them, and a figure of each.
  function compared() {
    if (!data.compared) return null;
    const { heading, lines, more, plot } = data.compared;
    const board = element("div");
    const redraw = plot ? rankPlot(board, plot) : null;
    const said = lines.map((line) =>
      element(
        "li",
        {},
        line.stands_out ? element("strong", {}, line.who) : line.who,
        `: ${line.what}`,
      ),
    );
    const place = card(
      "How the ranks compare",
      heading,
      element("ul", { class: "ranks" }, ...said, more ? element("li", {}, more) : null),
      board,
    );
    return [place, redraw];
  }

  function ranks() {
    if (!data.ranks) return null;
    const { figure, text } = table;
    return card(
      "Ranks",
      data.ranks.note,
      table({
        caption: "rank",
        rows: data.ranks.rows,
        sort: 1,
        folds: true,
        filter: data.ranks.rows.length > MOST_LINES,
        text: (row) => `${row.rank} ${row.host} ${row.end} ${row.label || ""}`,
        columns: [
          { label: "rank", value: (row) => row.rank, cell: (row) => `rank ${row.rank}` },
          text("findings", "label"),
          text("how it ended", "end"),
          figure("steps", "steps", whole),
          figure("watched for", "watched_s", seconds),
          text("machine", "host"),
        ],
      }),
    );
  }

  const ended = data.ended
    ? card("How it ended", null, element("pre", { class: "ended" }, data.ended))
    : null;
  report.show(data, [
    report.verdict(data.verdict),
    ...data.findings.map(finding),
    data.more ? element("p", { class: "card" }, prose(data.more)) : null,
    ended,
    compared(),
    ...data.charts.map(course),
    ledgers(),
    ranks(),
    card(
      "What was run",
      null,
      facts(data.run.map(([name, value]) => [name, name === "command" ? code(value) : value])),
    ),
    report.notes("Notes", data.notes),
  ]);
})();
