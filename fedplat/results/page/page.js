"use strict";
(() => {
  const EVERY_MS = 3000;
  const live = document.documentElement.hasAttribute("data-live");
  const byId = (id) => document.getElementById(id);
  let data = JSON.parse(byId("data").textContent);
  const chosen = {}; // what a reader has chosen, by name, so that it outlives new data
  const log = {};
  const drawn = new Map(); // place of a chart -> its description

  const make = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  };

  // Colours ------------------------------------------------------------------------------------------------

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const SCALES = {
    light: { seq: ["#e3ebf6", "#9dbfe3", "#4a8ac4", "#1a5896", "#08305f"] },
    dark: { seq: ["#22304a", "#2c5689", "#3e85c6", "#7db8ea", "#dceefc"] },
  };
  const NAMED = {
    light: { honest: "#3a86c8", weight: "#5b9e94", noweight: "#e07b39", unreliable: "#e0a100", untargeted: "#d1495b", targeted: "#8b2fa0", none: "#cfd5dc",
      refused: "#3b3f45", failed: "#9aa1a9", late: "#e0a100", memory: "#8b2fa0", dropped: "#9aa1a9", away: "#e6e9ed" },
    dark: { honest: "#5aa9e6", weight: "#5fb3a6", noweight: "#f09457", unreliable: "#f2c14e", untargeted: "#f0697b", targeted: "#c77ddb", none: "#454c56",
      refused: "#e8eaed", failed: "#7b848f", late: "#f2c14e", memory: "#c77ddb", dropped: "#7b848f", away: "#2b3038" },
  };
  // Kelly's and Tol's colours for up to 20 classes, of middling lightness so that they suit both backgrounds.
  const CLASSES = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#8c8c8c", "#44bb99",
    "#99642e", "#77aadd", "#b8336a", "#9aa83a", "#dd9900", "#5566cc", "#cc8899", "#337766", "#c7a3e0", "#885544", "#bbbbbb"];
  const TOKEN = /^@(\w+)(?:\/([\d.]+))?$/;

  const colourOf = (name, opacity) => {
    const theme = dark.matches ? "dark" : "light";
    const ofClass = /^c(\d+)$/.exec(name);
    const found = (ofClass && CLASSES[Number(ofClass[1])]) || NAMED[theme][name] || getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
    if (opacity === undefined || !found.startsWith("#")) return found;
    const part = (at) => parseInt(found.slice(at, at + 2), 16);
    return `rgba(${part(1)},${part(3)},${part(5)},${opacity})`;
  };

  const coloured = (value) => {
    if (typeof value === "string") {
      const match = TOKEN.exec(value);
      if (!match) return value;
      const scale = SCALES[dark.matches ? "dark" : "light"][match[1]];
      if (scale) return scale.map((colour, index) => [index / (scale.length - 1), colour]);
      return colourOf(match[1], match[2]);
    }
    if (Array.isArray(value)) return value.some((item) => item !== null && typeof item !== "number") ? value.map(coloured) : value;
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, coloured(item)]));
    return value;
  };

  // Charts -------------------------------------------------------------------------------------------------

  const merged = (base, over) => {
    const result = { ...base };
    for (const [key, value] of Object.entries(over || {}))
      result[key] = value && typeof value === "object" && !Array.isArray(value) && base[key] ? merged(base[key], value) : value;
    return result;
  };

  // A matrix of a few kinds comes as one letter per cell, "." for none.
  const unpacked = (trace) => {
    if (!trace.letters) return trace;
    const { letters, words, ...rest } = trace;
    const codes = letters.map((row) => Array.from(row, (letter) => (letter === "." ? null : letter.charCodeAt(0) - 97)));
    return { ...rest, z: codes, text: codes.map((row) => row.map((code) => (code === null ? "" : words[code]))) };
  };

  const axis = (narrow) => ({
    gridcolor: "@line", linecolor: "@line", zerolinecolor: "@line", tickcolor: "@line", automargin: true,
    title: { font: { size: narrow ? 12 : 13 }, standoff: 8 }, tickfont: { size: narrow ? 10 : 12 }, hoverformat: ".4~g",
  });

  const layoutOf = (chart, view, width) => {
    const narrow = width < 480;
    const base = {
      height: view.height || chart.height, width, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: "@fg", size: 12, family: getComputedStyle(document.body).fontFamily },
      margin: { l: 8, r: 8, t: 8, b: 8, autoexpand: true },
      hovermode: "x unified", hoverlabel: { bgcolor: "@card", bordercolor: "@line", font: { color: "@fg" } },
      legend: { orientation: "h", x: 0, xanchor: "left", yref: "container", y: 0.005, yanchor: "bottom", font: { size: 12 } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: "@muted", activecolor: "@fg" },
      dragmode: narrow ? false : "zoom", xaxis: axis(narrow), yaxis: axis(narrow),
      uirevision: `${chart.id} ${keyOf(chart)}`,
    };
    const layout = merged(base, view.layout);
    for (const name of Object.keys(layout))
      if (/^[xy]axis\d/.test(name)) layout[name] = merged(axis(narrow), layout[name]);
    if (chart.log && log[chart.id]) {
      const name = `${chart.log}axis`;
      layout[name] = { ...layout[name], type: "log", exponentformat: "power", dtick: undefined };
    }
    return coloured(layout);
  };

  const options = (narrow) => ({
    responsive: false, displaylogo: false, displayModeBar: narrow ? false : "hover", scrollZoom: false,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  });

  const keyOf = (chart) => [chart.section, chosen[chart.section] ?? "", chosen[chart.id] ?? "", log[chart.id] ?? ""].join("/");

  const indexOf = (list, value) => Math.max(0, (list || []).indexOf(value));

  const viewOf = (chart, section) => {
    const row = chart.views[section.select ? indexOf(section.select.options, chosen[section.id]) : 0] || [];
    return row[indexOf(chart.options, chosen[chart.id])] || null;
  };

  const draw = (place) => {
    const { chart, section } = drawn.get(place);
    const view = viewOf(chart, section);
    const note = place.parentElement.querySelector(".note");
    note.textContent = (view && view.note) || "";
    note.hidden = !note.textContent;
    place.parentElement.hidden = !view; // one that comes back is drawn when the watcher sees it
    if (!view || !place.clientWidth || !place.dataset.seen) return;
    const width = place.clientWidth;
    const traces = view.traces.map((trace) => coloured(unpacked(trace)));
    return window.Plotly.react(place, traces, layoutOf(chart, view, width), options(width < 480));
  };

  const drawAll = (section) => {
    for (const [place, what] of drawn) if (!section || what.section.id === section) draw(place);
  };

  // Charts far below are drawn when they are about to be seen.
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries)
      if (entry.isIntersecting && !entry.target.dataset.seen) {
        entry.target.dataset.seen = "1";
        draw(entry.target);
      }
  }, { rootMargin: "600px" });

  const chooser = (label, list, name, changed, first) => {
    const select = make("select", { "data-choice": name });
    for (const option of list) select.append(make("option", { value: option }, option));
    select.value = list.includes(chosen[name]) ? chosen[name] : first || list[0];
    chosen[name] = select.value;
    select.addEventListener("change", () => { chosen[name] = select.value; changed(); });
    return make("label", { class: "choice" }, label, select);
  };

  const article = (chart, section) => {
    chart.section = section.id;
    const place = make("div", { class: "chart", id: `chart-${chart.id}`, role: "img", "aria-label": chart.title });
    place.style.minHeight = `${chart.height}px`;
    const node = make("article", chart.wide ? { class: "wide" } : {}, make("h3", {}, chart.title));
    if (chart.about) node.append(make("p", { class: "about" }, chart.about));
    if ((chart.options || []).length > 1) node.append(chooser(chart.choice || "show", chart.options, chart.id, () => draw(place)));
    if (chart.log) {
      if (!(chart.id in log)) log[chart.id] = Boolean(chart.log_on);
      const box = make("input", { type: "checkbox" });
      box.checked = log[chart.id];
      box.addEventListener("change", () => { log[chart.id] = box.checked; draw(place); });
      node.append(make("label", { class: "choice" }, box, "logarithmic"));
    }
    node.append(place, make("p", { class: "about note", hidden: "" }));
    drawn.set(place, { chart, section });
    return node;
  };

  let shape = "";
  const shapeOf = () => JSON.stringify(data.sections.map((s) => [s.id, s.select, s.text, s.charts.map((c) => [c.id, c.options])]));

  const buildCharts = () => {
    shape = shapeOf();
    const root = byId("charts");
    for (const place of drawn.keys()) { watcher.unobserve(place); window.Plotly.purge(place); }
    drawn.clear();
    root.replaceChildren();
    for (const section of data.sections) {
      const node = make("section", { id: section.id }, make("h2", {}, section.title));
      if (section.text) node.append(make("p", { class: "about" }, section.text));
      if (section.select && section.select.options.length > 1)
        node.append(chooser(section.select.label, section.select.options, section.id, () => drawAll(section.id), section.select.first));
      else if (section.select) chosen[section.id] = section.select.options[0];
      node.append(make("div", { class: "grid" }, ...section.charts.map((chart) => article(chart, section))));
      root.append(node);
    }
    for (const place of drawn.keys()) {
      draw(place);
      watcher.observe(place);
    }
  };

  const updateCharts = () => {
    if (shapeOf() !== shape) return buildCharts();
    for (const place of drawn.keys()) {
      const { chart, section } = drawn.get(place);
      const now = data.sections.find((s) => s.id === section.id);
      const next = now.charts.find((c) => c.id === chart.id);
      next.section = section.id;
      drawn.set(place, { chart: next, section: now });
    }
    drawAll();
  };

  // Tables -------------------------------------------------------------------------------------------------

  const numberIn = (cell) => (cell.dataset.v === undefined ? null : Number(cell.dataset.v));

  const sortRows = (table, column, order) => {
    const body = table.tBodies[0];
    const rows = Array.from(body.rows);
    const sign = order === "ascending" ? 1 : -1;
    const numeric = rows.some((row) => numberIn(row.cells[column]) !== null);
    rows.sort((one, other) => {
      const [a, b] = [one.cells[column], other.cells[column]];
      if (!numeric) return sign * a.textContent.localeCompare(b.textContent, undefined, { numeric: true });
      const [x, y] = [numberIn(a), numberIn(b)];
      if (x === null || y === null) return (x === null) - (y === null); // what is not known is last either way
      return sign * (x - y);
    });
    body.append(...rows);
    Array.from(table.tHead.rows[0].cells).forEach((head, index) => {
      if (index === column) head.setAttribute("aria-sort", order);
      else head.removeAttribute("aria-sort");
    });
  };

  document.addEventListener("click", (event) => {
    const head = event.target.closest && event.target.closest("thead th");
    if (!head || !event.target.closest("button")) return;
    const table = head.closest("table");
    const numbers = Array.from(table.tBodies[0].rows).some((row) => numberIn(row.cells[head.cellIndex]) !== null);
    const now = head.getAttribute("aria-sort");
    const first = numbers ? "descending" : "ascending";
    sortRows(table, head.cellIndex, !now ? first : now === "ascending" ? "descending" : "ascending");
  });

  const fillTable = (table, content) => {
    const sorted = table.querySelector("thead [aria-sort]");
    const head = table.tHead.rows[0];
    content.heads.forEach((text, index) => {
      if (head.cells[index]) head.cells[index].firstChild.textContent = text;
      else head.append(make("th", index < content.text_columns ? { scope: "col", class: "text" } : { scope: "col" }, make("button", { type: "button" }, text)));
    });
    while (head.cells.length > content.heads.length) head.lastChild.remove();
    const rows = content.rows.map((row) => {
      const name = make("th", { scope: "row" });
      if (row.style !== undefined && row.style !== null) name.append(make("i", { class: `swatch s${row.style % 7}` }));
      name.append(row.name);
      return make("tr", {}, name, ...row.cells.map((cell, index) => {
        const node = make("td", index + 1 < content.text_columns ? { class: "text" } : {});
        if (cell.v !== null) node.dataset.v = cell.v;
        node.append(cell.best ? make("strong", {}, cell.t) : cell.t);
        for (const line of cell.beside || []) node.append(make("small", {}, line));
        return node;
      }));
    });
    table.tBodies[0].replaceChildren(...rows);
    if (sorted && sorted.isConnected) sortRows(table, sorted.cellIndex, sorted.getAttribute("aria-sort"));
  };

  const updateTables = () => {
    for (const content of data.tables) {
      const table = byId(`table-${content.id}`);
      if (table) fillTable(table, content);
    }
    if (data.left_out && byId("table-left-out")) fillTable(byId("table-left-out"), data.left_out);
  };

  // A table of many metrics or blocks shows those that are chosen.
  const chooseTables = () => {
    const articles = Array.from(byId("tables").children);
    const show = () => articles.forEach((node, index) => {
      const filters = data.tables[index].filters || {};
      node.hidden = Object.entries(filters).some(([key, value]) => chosen[key] !== undefined && chosen[key] !== "all" && chosen[key] !== value);
    });
    byId("choices").replaceChildren(...(data.choices || []).map((choice) => chooser(choice.label, choice.options, choice.id, show)));
    show();
  };

  // Copying ------------------------------------------------------------------------------------------------

  document.addEventListener("click", async (event) => {
    if (!event.target.matches || !event.target.matches("button.copy")) return;
    const button = event.target;
    const pre = button.parentElement.querySelector("pre");
    try {
      await navigator.clipboard.writeText(pre.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(pre);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });

  // Following a run ----------------------------------------------------------------------------------------

  const clock = (text) => new Date(text).toLocaleString();

  const tellStatus = (reached) => {
    const { state, updated, usual_seconds: usual, done, rounds } = data.status;
    const node = byId("status");
    const rest = [data.subtitle];
    const far = Object.entries(done || {}).map(([name, number]) => `${name} ${number}`).join(", ");
    let word = "finished";
    if (state !== "finished") {
      const quiet = updated ? (Date.now() - Date.parse(updated)) / 1000 : 0;
      const patience = Math.max(60, 5 * (usual || 0));
      word = !updated ? "waiting for the first round" : quiet > patience ? `no new round since ${clock(updated)}` : "running";
      if (far) rest.push(`${far} of ${rounds} rounds`);
      if (quiet > patience) rest.push("interrupted, or a long round");
    }
    if (reached === false) rest.push("the server does not answer: this page is not followed any more");
    node.replaceChildren(make("b", {}, word), " · ", rest.filter(Boolean).join(" · "));
    document.title = state === "finished" ? `${data.title} – fedplat` : `${word} · ${data.title}`;
  };

  let tag = "";
  let stopped = false;
  const follow = async () => {
    let reached = true;
    try {
      const answer = await fetch("data.json", { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
      if (answer.status === 200) {
        tag = answer.headers.get("ETag") || "";
        data = await answer.json();
        updateTables();
        updateCharts();
      } else if (answer.status !== 304) reached = false;
    } catch {
      reached = false;
    }
    tellStatus(reached);
    stopped = data.status.state === "finished";
    if (!stopped) setTimeout(follow, EVERY_MS);
  };

  // Start --------------------------------------------------------------------------------------------------

  const trouble = (text) => {
    const node = byId("trouble");
    node.textContent = text;
    node.hidden = false;
  };

  const loadPlotly = async () => {
    const packed = byId("plotly");
    if (typeof DecompressionStream === "undefined")
      throw new Error("this browser is too old for them (it has no DecompressionStream, which came in 2020 to 2023)");
    const bytes = Uint8Array.from(atob(packed.textContent), (letter) => letter.charCodeAt(0));
    packed.remove();
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    script.remove();
  };

  const start = async () => {
    chooseTables();
    if (live) tellStatus(true);
    try {
      await loadPlotly();
      buildCharts();
    } catch (error) {
      trouble(`The charts cannot be shown: ${error.message}.`);
      return;
    }
    dark.addEventListener("change", () => drawAll());
    let waiting = 0;
    let width = document.documentElement.clientWidth;
    addEventListener("resize", () => {
      if (document.documentElement.clientWidth === width) return;
      width = document.documentElement.clientWidth;
      clearTimeout(waiting);
      waiting = setTimeout(() => drawAll(), 150);
    });
    addEventListener("beforeprint", () => { for (const place of drawn.keys()) { place.dataset.seen = "1"; draw(place); } });
    if (live) follow();
  };

  start();
})();
