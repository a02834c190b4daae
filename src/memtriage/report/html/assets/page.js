"use strict";
// What every page needs: elements without markup, numbers in words, packed columns, theme, tabs, drawing again.
const page = (() => {
  const UNITS = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
  const UNKNOWN = "n/a";
  const ARRAYS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, f8: Float64Array };
  const drawings = [];
  let nextId = 0;

  // Children are nodes or plain text; a key of `options` is an attribute, or `on`, an object of listeners.
  function element(name, options = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(options)) {
      if (key === "on") {
        for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
      } else if (value !== null && value !== undefined) {
        made.setAttribute(key, value);
      }
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  }

  // The words of memtriage.model.units.size.
  function bytes(count) {
    if (count === null || count === undefined) return UNKNOWN;
    if (Math.abs(count) < 1024) return `${Math.round(count)} B`;
    let value = count;
    let unit = "";
    for (unit of UNITS) {
      value /= 1024;
      if (Math.round(Math.abs(value) * 10) / 10 < 1024) break;
    }
    return `${value.toFixed(1)} ${unit}`;
  }

  const signed = (count) => (count > 0 ? `+${bytes(count)}` : bytes(count));

  const whole = (count) => (count === null || count === undefined ? UNKNOWN : count.toLocaleString("en-US"));

  const counted = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;

  function seconds(value) {
    const size = Math.abs(value);
    if (size === 0) return "0 s";
    if (size < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
    if (size < 1) return `${(value * 1000).toFixed(size < 0.1 ? 1 : 0)} ms`;
    if (size < 120) return `${value.toFixed(size < 10 ? 2 : 1)} s`;
    return size < 7200 ? `${(value / 60).toFixed(1)} min` : `${(value / 3600).toFixed(1)} h`;
  }

  // A column of memtriage.report.html.columns as numbers.
  function unpack(column) {
    const text = atob(column.base64);
    const raw = new Uint8Array(text.length);
    for (let index = 0; index < text.length; index += 1) raw[index] = text.charCodeAt(index);
    const entries = new ARRAYS[column.type](raw.buffer);
    const values = new Float64Array(entries.length);
    for (let index = 0; index < entries.length; index += 1)
      values[index] = column.from + column.unit * entries[index];
    return values;
  }

  // A color of page.css as the canvas takes it, in the theme that is on.
  function color(name) {
    const probe = document.documentElement;
    probe.style.outlineColor = `var(--${name})`;
    const value = getComputedStyle(probe).outlineColor;
    probe.style.outlineColor = "";
    return value;
  }

  function hatch(context, line, ground) {
    const tile = document.createElement("canvas");
    const side = 6 * Math.max(1, Math.round(devicePixelRatio));
    tile.width = tile.height = side;
    const pen = tile.getContext("2d");
    pen.fillStyle = ground;
    pen.fillRect(0, 0, side, side);
    pen.strokeStyle = line;
    pen.lineWidth = side / 4;
    for (const shift of [-side, 0, side]) {
      pen.beginPath();
      pen.moveTo(shift - 1, side + 1);
      pen.lineTo(shift + side + 1, -1);
      pen.stroke();
    }
    return context.createPattern(tile, "repeat");
  }

  // Registers a function that draws into `place` (and again whenever its width or the theme changes).
  function drawing(place, draw) {
    let width = 0;
    const again = (force) => {
      const now = Math.floor(place.clientWidth);
      if (now > 0 && (force || now !== width)) {
        width = now;
        draw(now);
      }
    };
    drawings.push(again);
    if (window.ResizeObserver) new ResizeObserver(() => again(false)).observe(place);
    return again;
  }

  const redraw = () => drawings.forEach((again) => again(true));

  function themeChoice() {
    let chosen = "auto";
    const show = (name) => {
      if (name === "auto") delete document.documentElement.dataset.theme;
      else document.documentElement.dataset.theme = name;
      redraw();
    };
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    // Paper is white: charts are drawn once more, light, for the time of printing.
    window.addEventListener("beforeprint", () => show("light"));
    window.addEventListener("afterprint", () => show(chosen));
    const themes = ["auto", "light", "dark"].map((name) => [name, name]);
    return choice("colors", themes, chosen, (name) => {
      chosen = name;
      show(name);
    });
  }

  // A group of buttons of which one is pressed.
  function choice(label, options, chosen, onChoose) {
    const buttons = options.map(([key, text]) =>
      element(
        "button",
        {
          type: "button",
          "data-choice": key,
          "aria-pressed": String(key === chosen),
          on: {
            click: () => {
              buttons.forEach((button, index) =>
                button.setAttribute("aria-pressed", String(options[index][0] === key)),
              );
              onChoose(key);
            },
          },
        },
        text,
      ),
    );
    return element("div", { class: "choice", role: "group", "aria-label": label }, ...buttons);
  }

  // A choice among more than fit on buttons.
  function select(label, options, chosen, onChoose) {
    const made = element(
      "select",
      { "aria-label": label, on: { change: () => onChoose(made.value) } },
      ...options.map(([key, text]) => element("option", { value: key }, text)),
    );
    made.value = chosen;
    return made;
  }

  // Tabs as the ARIA practices describe them: arrows move, the chosen one alone takes the focus. A panel is
  // built when it is first shown. `items` are {label, level, build}.
  function tabs(label, items) {
    const panels = items.map((_, index) =>
      element("section", {
        role: "tabpanel",
        id: `panel-${nextId}-${index}`,
        "aria-labelledby": `tab-${nextId}-${index}`,
        tabindex: "-1",
      }),
    );
    const show = (index, focus) => {
      panels.forEach((panel, at) => {
        panel.hidden = at !== index;
      });
      heads.forEach((head, at) => {
        head.setAttribute("aria-selected", String(at === index));
        head.tabIndex = at === index ? 0 : -1;
      });
      if (!panels[index].hasChildNodes()) items[index].build(panels[index]);
      if (focus) heads[index].focus();
    };
    const onKey = (event, index) => {
      const last = items.length - 1;
      const goal = {
        ArrowRight: index === last ? 0 : index + 1,
        ArrowLeft: index === 0 ? last : index - 1,
        Home: 0,
        End: last,
      }[event.key];
      if (goal === undefined) return;
      event.preventDefault();
      show(goal, true);
    };
    const heads = items.map((item, index) =>
      element(
        "button",
        {
          type: "button",
          role: "tab",
          id: `tab-${nextId}-${index}`,
          "aria-controls": `panel-${nextId}-${index}`,
          on: { click: () => show(index, false), keydown: (event) => onKey(event, index) },
        },
        item.level ? element("span", { class: `mark level-${item.level}` }) : null,
        item.label,
      ),
    );
    nextId += 1;
    const bar = element("div", { class: "tabs", role: "tablist", "aria-label": label }, ...heads);
    bar.hidden = items.length < 2;
    return { bar, panels, show };
  }

  // A box of words at a point of a board: `show(lines, x, y)` with the first line strong, and `hide()`.
  function tip(board) {
    const box = element("div", { class: "tip", hidden: "" });
    board.append(box);
    return {
      show([first, ...rest], x, y) {
        box.replaceChildren(
          element("strong", {}, first),
          ...rest.map((line) => element("div", { class: "site" }, line)),
        );
        box.hidden = false;
        box.style.left = `${Math.max(0, Math.min(x + 12, board.clientWidth - box.offsetWidth))}px`;
        box.style.top = `${y}px`;
      },
      hide() {
        box.hidden = true;
      },
    };
  }

  // Fits a canvas into a width; returns its pen, which draws in pixels of the page.
  function penOf(canvas, width, height) {
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    return pen;
  }

  return {
    element,
    bytes,
    signed,
    whole,
    counted,
    seconds,
    unpack,
    color,
    hatch,
    drawing,
    themeChoice,
    choice,
    select,
    tabs,
    tip,
    penOf,
    data: () => JSON.parse(document.getElementById("data").textContent),
  };
})();
