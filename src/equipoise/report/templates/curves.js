"use strict";
// Draws the loss curves from the numbers in #curve-data, in place of the still figures, and reads values off them.
// Not for: computing any statistic (report/curves.py does). Text goes in as text nodes alone, never as markup.
(() => {
  const block = document.getElementById("curve-data");
  if (!block) return;
  const data = JSON.parse(block.textContent);
  const AXES = ["tokens", "flops", "seconds"];
  const LOSS = 3, LOW = 4, HIGH = 5; // places in a point, after one per axis
  const LEFT = 46, RIGHT = 12, TOP = 26, BOTTOM = 44; // margins of the frame, px
  const MARKERS = {
    o: "M4,0A4,4 0 1 1 -4,0A4,4 0 1 1 4,0Z",
    s: "M-3.5,-3.5H3.5V3.5H-3.5Z",
    "^": "M0,-4.5L4.2,3.2H-4.2Z",
    D: "M0,-4.6L4.6,0L0,4.6L-4.6,0Z",
    v: "M0,4.5L4.2,-3.2H-4.2Z",
    P: "M-1.5,-4.2H1.5V-1.5H4.2V1.5H1.5V4.2H-1.5V1.5H-4.2V-1.5H-1.5Z",
    X: "M-4,-2.4L-2.4,-4L0,-1.6L2.4,-4L4,-2.4L1.6,0L4,2.4L2.4,4L0,1.6L-2.4,4L-4,2.4L-1.6,0Z",
    h: "M0,-4.4L3.8,-2.2V2.2L0,4.4L-3.8,2.2V-2.2Z",
  };

  const choices = document.getElementById("curve-choices");
  const chosen = (name) => choices.querySelector(`input[name="curve-${name}"]:checked`).value;

  function add(parent, tag, attributes, text) {
    const svg = parent.namespaceURI.endsWith("/svg") || tag === "svg";
    const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value !== "") node.setAttribute(name, value);
    }
    if (text !== undefined) node.textContent = text;
    return parent.appendChild(node);
  }

  // ---------------------------------------------------------------------------------------------- numbers

  const plain = (value) => String(Number(value.toPrecision(4)));
  const loss = (value) => value.toFixed(4);

  function ticks(low, high, log, most) {
    if (log) {
      const found = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
        for (const digit of [1, 2, 5]) found.push(Number(`${digit}e${power}`));
      }
      const within = found.filter((value) => value >= low && value <= high);
      const decades = within.filter((value) => /^1e|^10*$|^0\.0*1$/.test(String(value)));
      if (within.length > 2) return within.length > most + 2 && decades.length > 1 ? decades : within;
    }
    const rough = (high - low) / most;
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = unit * [1, 2, 5, 10].find((factor) => factor * unit >= rough);
    const first = Math.ceil(low / step - 1e-9);
    return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, index) => (first + index) * step);
  }

  function scale(low, high, from, to, log) {
    const place = log ? Math.log : (value) => value;
    const span = place(high) - place(low) || 1;
    return (value) => from + ((place(value) - place(low)) / span) * (to - from);
  }

  // ---------------------------------------------------------------------------------------------- one plot

  function plot(budget, place) {
    const slider = document.createElement("div");
    const legend = document.createElement("table");
    let cursor = null; // number of the point of `marks` that is read; none: the last
    let marks = [];

    function lines(axis, log, seeds) {
      const usable = (points) => points.filter((p) => p[axis] !== null && p[LOSS] !== null && (!log || p[axis] > 0));
      return budget.arms.map((arm) => ({
        arm,
        mean: seeds ? [] : usable(arm.mean),
        runs: arm.seeds
          .filter((run) => seeds || !run.whole)
          .map((run) => ({ seed: run.seed, whole: run.whole, points: usable(run.points) })),
      }));
    }

    function draw() {
      const axis = AXES.indexOf(chosen("axis"));
      const log = chosen("scale") === "log";
      const seeds = chosen("show") === "seeds";
      const unit = budget.units[AXES[axis]];
      const drawn = lines(axis, log, seeds);
      const all = drawn.flatMap((line) => [line.mean, ...line.runs.map((run) => run.points)]);
      const points = all.flat();
      const width = Math.max(260, slider.clientWidth);
      const height = Math.round(Math.min(420, Math.max(250, 0.56 * width)));
      const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      for (const [name, value] of [["viewBox", `0 0 ${width} ${height}`], ["width", "100%"], ["aria-hidden", "true"]]) {
        svg.setAttribute(name, value);
      }
      const xs = points.map((p) => p[axis] / unit.divisor);
      const [left, right] = log ? [Math.min(...xs), Math.max(...xs)] : [0, 1.01 * Math.max(...xs, 1e-9)];
      let [low, high] = budget.frame;
      if (log) {
        const losses = points.map((p) => p[LOSS]).concat(data.floor === null ? [] : [data.floor]);
        [low, high] = [0.98 * Math.min(...losses), 1.02 * Math.max(...losses)];
      } else {
        [low, high] = [low - 0.05 * (high - low), high + 0.08 * (high - low)];
      }
      const x = scale(left, right, LEFT, width - RIGHT, log);
      const y = scale(low, high, height - BOTTOM, TOP, log);
      const rise = (value) => Math.max(y(value), TOP - 40); // what lies far above the frame needs no far coordinates
      if (points.length) {
        frame(svg, { x, y, left, right, low, high, log, width, height, label: unit.label });
        curves(svg, drawn, (p) => [x(p[axis] / unit.divisor), rise(p[LOSS])], rise, (p) => x(p[axis] / unit.divisor));
      }
      marks = [...new Set(points.map((p) => p[axis]))].sort((a, b) => a - b);
      slider.setAttribute("aria-valuemax", Math.max(0, marks.length - 1));
      slider.replaceChildren(svg);
      const state = { svg, drawn, axis, unit, x, rise, height, seeds };
      state.position = (event) => {
        const box = svg.getBoundingClientRect();
        const at = ((event.clientX - box.left) / box.width) * width;
        return marks.reduce((best, mark, index) =>
          Math.abs(x(mark / unit.divisor) - at) < Math.abs(x(marks[best] / unit.divisor) - at) ? index : best, 0);
      };
      read(state);
      return state;
    }

    function frame(svg, { x, y, left, right, low, high, log, width, height, label }) {
      const clip = add(add(svg, "defs"), "clipPath", { id: `${place.id}-clip` });
      add(clip, "rect", { x: LEFT, y: TOP, width: width - LEFT - RIGHT + 6, height: height - TOP - BOTTOM + 1 });
      for (const value of ticks(low, high, log, 6)) {
        add(svg, "line", { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value), class: "grid-line" });
        add(svg, "text", { x: LEFT - 7, y: y(value) + 4, "text-anchor": "end" }, plain(value));
      }
      add(svg, "line", { x1: LEFT, x2: width - RIGHT, y1: height - BOTTOM, y2: height - BOTTOM, class: "axis-line" });
      for (const value of ticks(left, right, log, width < 480 ? 4 : 7)) {
        add(svg, "line", { x1: x(value), x2: x(value), y1: height - BOTTOM, y2: height - BOTTOM + 4, class: "axis-line" });
        add(svg, "text", { x: x(value), y: height - BOTTOM + 17, "text-anchor": "middle" }, plain(value));
      }
      add(svg, "text", { x: (LEFT + width - RIGHT) / 2, y: height - 6, "text-anchor": "middle" }, label);
      add(svg, "text", { x: 4, y: 14 }, `${data.metric} (nats/token)`);
      if (data.floor !== null) {
        add(svg, "line", { x1: LEFT, x2: width - RIGHT, y1: y(data.floor), y2: y(data.floor), class: "floor-line" });
      }
    }

    function curves(svg, drawn, at, rise, across) {
      const path = (points) => points.map((p, index) => `${index ? "L" : "M"}${at(p).map((c) => c.toFixed(1))}`).join("");
      const inside = add(svg, "g", { "clip-path": `url(#${place.id}-clip)` });
      for (const { arm, mean, runs } of drawn) {
        const colour = `var(--${arm.colour})`;
        const band = mean.filter((p) => p[LOW] !== null);
        if (band.length > 1) {
          const edge = (p, end) => `${across(p).toFixed(1)},${rise(p[end]).toFixed(1)}`;
          const corners = [...band.map((p) => edge(p, HIGH)), ...band.reverse().map((p) => edge(p, LOW))];
          add(inside, "polygon", { points: corners.join(" "), fill: colour, "fill-opacity": 0.2, stroke: "none" });
        }
        for (const run of runs) {
          const dashes = run.whole ? arm.dashes : "5 3";
          const look = { d: path(run.points), fill: "none", stroke: colour, "stroke-width": 1.3, "stroke-dasharray": dashes };
          add(inside, "path", { ...look, class: "seed" });
          if (!run.whole && run.points.length) {
            const [cx, cy] = at(run.points[run.points.length - 1]);
            const cross = `M${cx - 4},${Math.max(cy, TOP) - 4}l8,8m0,-8l-8,8`;
            add(svg, "path", { d: cross, stroke: colour, "stroke-width": 1.8, fill: "none" });
          }
        }
        const look = { d: path(mean), fill: "none", stroke: colour, "stroke-width": 2.2, "stroke-dasharray": arm.dashes };
        if (mean.length) add(inside, "path", { ...look, class: "mean" });
        const marked = mean.length ? [mean] : runs.map((run) => run.points);
        for (const points of marked) {
          const every = Math.max(1, Math.floor(points.length / 6));
          for (const p of points.filter((_, index) => index % every === every - 1)) {
            const shape = { d: MARKERS[arm.marker], fill: colour, transform: `translate(${at(p).map((c) => c.toFixed(1))})` };
            add(inside, "path", shape);
          }
        }
      }
    }

    // The values at the cursor, arm by arm; without one, those at the end.
    function read({ svg, drawn, axis, unit, x, rise, height, seeds }) {
      for (const old of svg.querySelectorAll(".cursor")) old.remove();
      const index = cursor === null ? marks.length - 1 : Math.min(cursor, marks.length - 1);
      const value = marks[index];
      const where = value === undefined ? "no point" : `${unit.label}: ${plain(value / unit.divisor)}`;
      const nearest = (points) => {
        const best = points.reduce((a, b) => (Math.abs(b[axis] - value) < Math.abs(a[axis] - value) ? b : a), points[0]);
        const before = points[points.indexOf(best) - 1] || points[1];
        return best && Math.abs(best[axis] - value) <= Math.abs(best[axis] - (before || best)[axis]) ? best : undefined;
      };
      const shown = cursor !== null;
      if (shown && value !== undefined) {
        const at = x(value / unit.divisor);
        add(svg, "line", { x1: at, x2: at, y1: TOP, y2: height - BOTTOM, class: "cursor cursor-line" });
      }
      const dot = (p, arm) => {
        const at = { cx: x(p[axis] / unit.divisor), cy: rise(p[LOSS]), r: 4, fill: `var(--${arm.colour})` };
        if (shown && at.cy >= TOP) add(svg, "circle", { ...at, class: "cursor cursor-dot" });
      };
      const said = [];
      legend.replaceChildren();
      add(add(legend, "caption", { class: "reading" }), "span", {}, cursor === null ? `At the end; ${where}` : where);
      const body = add(legend, "tbody");
      for (const { arm, mean, runs } of drawn) {
        const read = [];
        const p = nearest(mean);
        if (p) {
          read.push(p[LOW] === null ? loss(p[LOSS]) : `${loss(p[LOSS])} [${loss(p[LOW])} to ${loss(p[HIGH])}]`);
          dot(p, arm);
        }
        for (const run of runs) {
          const own = nearest(run.points);
          if (own && seeds) read.push(`${loss(own[LOSS])} (seed ${run.seed})`);
          if (own) dot(own, arm);
        }
        said.push(`${arm.name} ${read.join(", ") || "–"}`);
        entry(body, arm, read.join("  ") || "–");
      }
      if (data.floor !== null) entry(body, null, loss(data.floor));
      slider.setAttribute("aria-valuenow", Math.max(0, index));
      slider.setAttribute("aria-valuetext", `${where}; ${said.join("; ")}`);
    }

    function entry(body, arm, value) {
      const row = add(body, "tr");
      const swatch = add(add(row, "td", { class: "swatch" }), "svg", { viewBox: "0 0 34 12", width: 34, "aria-hidden": "true" });
      const line = { x1: 0, x2: 34, y1: 6, y2: 6 };
      if (arm === null) {
        add(swatch, "line", { ...line, class: "floor-line" });
      } else {
        const colour = `var(--${arm.colour})`;
        add(swatch, "line", { ...line, stroke: colour, "stroke-width": 2.2, "stroke-dasharray": arm.dashes });
        add(swatch, "path", { d: MARKERS[arm.marker], fill: colour, transform: "translate(17,6)" });
      }
      const name = add(row, "th", { scope: "row" });
      add(name, "bdi", {}, arm === null ? "the grammar itself" : arm.name);
      if (arm && arm.notes) add(name, "span", { class: "mark" }, arm.notes);
      add(row, "td", { class: "reading" }, value);
    }

    place.replaceChildren(slider, legend);
    legend.className = "readings";
    const about = { tabindex: 0, role: "slider", "aria-label": `Values along training, ${budget.title}`, "aria-valuemin": 0 };
    for (const [name, value] of Object.entries(about)) slider.setAttribute(name, value);
    slider.className = "drawing";
    let state = draw();
    const redraw = () => {
      cursor = null;
      state = draw();
    };
    const move = (to) => {
      cursor = to === null ? null : Math.min(Math.max(to, 0), marks.length - 1);
      read(state);
    };
    slider.addEventListener("pointermove", (event) => move(state.position(event)));
    slider.addEventListener("pointerdown", (event) => move(state.position(event)));
    slider.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") move(null); });
    slider.addEventListener("keydown", (event) => {
      const now = cursor === null ? marks.length - 1 : cursor;
      const to = {
        ArrowLeft: now - 1, ArrowDown: now - 1, ArrowRight: now + 1, ArrowUp: now + 1, Home: 0, End: marks.length - 1, Escape: null,
      }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      move(to);
    });
    let width = slider.clientWidth;
    new ResizeObserver(() => {
      if (slider.clientWidth && slider.clientWidth !== width) {
        width = slider.clientWidth;
        redraw();
      }
    }).observe(slider);
    choices.addEventListener("change", redraw);
  }

  data.budgets.forEach((budget, index) => plot(budget, document.getElementById(`plot-${index}`)));
  choices.hidden = false;
})();
