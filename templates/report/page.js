(() => {
  "use strict";
  const { runs, charts } = JSON.parse(document.getElementById("data").textContent);
  const switches = document.getElementById("switches");
  const state = { axis: "step", log: false, hidden: new Set(), width: 0 };
  const plots = [];
  let isZooming = false;

  const short = (value, digits) => Number(value.toPrecision(digits)).toString();
  function counted(value) {
    const size = Math.abs(value);
    for (const [scale, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
      if (size >= scale) return short(value / scale, 4) + unit;
    }
    return short(value, 4);
  }
  function bytes(value) {
    const scale = value >= 2 ** 30 ? [2 ** 30, " GiB"] : [2 ** 20, " MiB"];
    return short(value / scale[0], 4) + scale[1];
  }
  function duration(seconds, longest) {
    if (longest < 180) return short(seconds, 3) + " s";
    if (longest < 10800) return short(seconds / 60, 3) + " min";
    return longest < 432000 ? short(seconds / 3600, 3) + " h" : short(seconds / 86400, 3) + " d";
  }
  const small = (value) => short(value, 4);
  const power = (value) => (value === 0 ? "0" : Number(value.toPrecision(4)).toExponential());
  const FORMS = { loss: small, power, plain: small, rate: counted, share: (value) => short(100 * value, 4) + "%", bytes };
  const TIME_STEPS = [0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
  for (let days = 2; days < 4000; days *= 2) TIME_STEPS.push(days * 86400);
  const BYTE_STEPS = [];
  for (let power = 10; power < 45; power++) BYTE_STEPS.push(2 ** power);

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colourOf = (run) => css("--c" + (run % 10));
  const faint = (colour, share) => colour + Math.round(share * 255).toString(16).padStart(2, "0");

  // The rows of a part that have a place on the axis, in its order.
  function table(part, columns) {
    const x = part[state.axis];
    const rows = x.map((_, row) => row).filter((row) => x[row] !== null);
    rows.sort((one, other) => x[one] - x[other]);
    return [rows.map((row) => x[row]), ...columns.map((column) => rows.map((row) => column[row]))];
  }

  function content(chart) {
    const tables = [], series = [{}], bands = [];
    runs.forEach((run, number) => {
      const colour = colourOf(number), show = !state.hidden.has(number);
      const columns = run.train.of[chart.key];
      if (columns) {
        const [mean, low, high] = columns;
        tables.push(table(run.train, low ? [high, low, mean] : [mean]));
        if (low) {
          const edge = { run: number, isEdge: true, show, width: 0, stroke: "transparent", points: { show: false } };
          series.push({ ...edge }, { ...edge });
          bands.push({ series: [series.length - 2, series.length - 1], fill: faint(colour, runs.length > 3 ? 0.12 : 0.22) });
        }
        const dash = number >= 5 ? [7, 4] : undefined;
        const points = mean.length < 3 ? { show: true, size: 6, fill: colour } : { show: false };
        series.push({ run: number, label: run.name, show, stroke: colour, width: 1.75, dash, points });
      }
      const validations = chart.valid && run.valid.of[chart.valid];
      if (validations) {
        tables.push(table(run.valid, [validations[0]]));
        const points = { show: true, size: 7, width: 1.5, stroke: colour, fill: css("--card") };
        series.push({ run: number, label: run.name + " validation", show, stroke: colour, width: 1, dash: [2, 4], points });
      }
    });
    return { data: tables.length > 1 ? uPlot.join(tables) : tables[0], series, bands };
  }

  function axisText(plot, values) {
    const longest = plot.scales.x.max;
    return values.map((value) => (value === null ? "" : state.axis === "time" ? duration(value, longest) : counted(value)));
  }

  function place(value, plot) {
    if (state.axis === "time") return duration(value, plot.scales.x.max);
    return state.axis === "tokens" ? counted(value) + " tokens" : "step " + value.toLocaleString("en");
  }

  function read(plot, chart, readout) {
    const at = plot.cursor.idx;
    if (at === null || at === undefined || plot.cursor.left < 0) {
      readout.textContent = "\u00a0";
      return;
    }
    const form = FORMS[chart.form], words = [];
    plot.series.forEach((series, number) => {
      if (!number || series.isEdge || !series.show) return;
      const near = nearest(plot.data[number], at);
      if (near === null) return;
      const name = runs.length > 1 ? series.label : series.label.endsWith(" validation") ? "validation" : chart.title.toLowerCase();
      words.push(name + " " + form(plot.data[number][near]));
    });
    readout.textContent = [place(plot.data[0][at], plot), ...words].join(" \u00b7 ");
  }

  // Of another run's points, the last one before the cursor.
  function nearest(column, at) {
    for (let row = at; row >= 0; row--) {
      if (column[row] !== null && column[row] !== undefined) return row;
    }
    return null;
  }

  function options(chart, element, drawn, readout) {
    const form = FORMS[chart.form], ink = css("--soft"), grid = { stroke: css("--grid"), width: 1 };
    const isLog = state.log && chart.form === "loss";
    const font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, Arial, 'DejaVu Sans', sans-serif";
    const common = { stroke: ink, grid, ticks: { ...grid, size: 5 }, font };
    return {
      width: state.width || element.clientWidth,
      height: element.closest(".wide") ? 320 : 220,
      legend: { show: false },
      cursor: { sync: { key: "report", scales: ["x", null] }, points: { size: 7 }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: isLog ? { distr: 3 } : { range: { min: { pad: 0.06 }, max: { pad: 0.06 } } } },
      axes: [
        { ...common, space: 74, size: 34, values: axisText, ...(state.axis === "time" ? { incrs: TIME_STEPS } : {}) },
        {
          ...common, size: 68, gap: 6,
          values: (_, values) => values.map((value) => (value === null ? "" : form(value))),
          ...(chart.form === "bytes" ? { incrs: BYTE_STEPS } : {}),
        },
      ],
      series: drawn.series,
      bands: drawn.bands,
      hooks: {
        setCursor: [(plot) => read(plot, chart, readout)],
        setScale: [(plot, key) => key === "x" && zoomOthers(plot)],
      },
    };
  }

  function zoomOthers(from) {
    const { min, max } = from.scales.x;
    if (isZooming || !plots.includes(from) || min === null) return;
    isZooming = true;
    for (const plot of plots) if (plot !== from) plot.setScale("x", { min, max });
    isZooming = false;
  }

  function showAll() {
    isZooming = true;
    const ends = plots.map((plot) => [plot.data[0][0], plot.data[0].at(-1)]);
    for (const plot of plots) plot.setScale("x", { min: Math.min(...ends.map((end) => end[0])), max: Math.max(...ends.map((end) => end[1])) });
    isZooming = false;
  }

  function build() {
    for (const plot of plots.splice(0)) plot.destroy();
    for (const element of document.querySelectorAll(".plot")) {
      const chart = charts[element.dataset.chart];
      const readout = document.querySelector(`[data-readout="${element.dataset.chart}"]`);
      const drawn = content(chart);
      if (!drawn.data || !drawn.data[0].length) continue;
      plots.push(new uPlot(options(chart, element, drawn, readout), drawn.data, element));
    }
  }

  function onKey(event) {
    const plot = plots.find((one) => event.currentTarget.contains(one.root));
    if (!plot) return;
    const last = plot.data[0].length - 1, { min, max } = plot.scales.x;
    const at = plot.cursor.left >= 0 && plot.cursor.idx !== null && plot.cursor.idx !== undefined ? plot.cursor.idx : -1;
    const moves = { ArrowLeft: at - (event.shiftKey ? 10 : 1), ArrowRight: at + (event.shiftKey ? 10 : 1), Home: 0, End: last };
    if (event.key in moves) {
      const row = Math.min(last, Math.max(0, moves[event.key]));
      plot.setCursor({ left: plot.valToPos(plot.data[0][row], "x"), top: plot.over.clientHeight / 2 });
    } else if (event.key === "+" || event.key === "-") {
      const middle = at >= 0 ? plot.data[0][at] : (min + max) / 2;
      const half = ((max - min) / 2) * (event.key === "+" ? 0.5 : 2);
      plot.setScale("x", { min: Math.max(plot.data[0][0], middle - half), max: Math.min(plot.data[0][last], middle + half) });
    } else if (event.key === "Escape") {
      showAll();
    } else return;
    event.preventDefault();
  }

  for (const radio of switches.querySelectorAll('[name="axis"]')) {
    radio.disabled = !runs.some((run) => run.train[radio.value].some((value) => value !== null) || run.valid[radio.value].some((value) => value !== null));
    radio.addEventListener("change", () => { state.axis = radio.value; build(); });
  }
  document.getElementById("log").addEventListener("change", (event) => { state.log = event.target.checked; build(); });
  document.getElementById("whole").addEventListener("click", showAll);
  switches.addEventListener("submit", (event) => event.preventDefault());
  for (const box of switches.querySelectorAll('[name="run"]')) {
    box.addEventListener("change", () => {
      const number = Number(box.value);
      if (box.checked) state.hidden.delete(number);
      else state.hidden.add(number);
      for (const plot of plots) plot.series.forEach((series, at) => series.run === number && plot.setSeries(at, { show: box.checked }));
    });
  }
  for (const element of document.querySelectorAll(".plot")) {
    element.addEventListener("keydown", onKey);
    new ResizeObserver(() => {
      const plot = plots.find((one) => element.contains(one.root));
      if (plot && element.clientWidth && !state.width) plot.setSize({ width: element.clientWidth, height: plot.height });
    }).observe(element);
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", build);
  // Paper is white and narrow, whatever the screen is.
  addEventListener("beforeprint", () => { document.documentElement.dataset.print = ""; state.width = 640; build(); });
  addEventListener("afterprint", () => { delete document.documentElement.dataset.print; state.width = 0; build(); });
  switches.reset();
  build();
})();
