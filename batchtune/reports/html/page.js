"use strict";
(() => {
  const scheme = matchMedia("(prefers-color-scheme: dark)");

  // Charts. Figures name colours by the page's CSS variables; here they become colours.
  const root = document.documentElement;
  const holder = document.getElementById("figures");
  const figures = holder ? JSON.parse(holder.textContent) : {};

  function coloured(value, style) {
    if (Array.isArray(value)) return value.map((item) => coloured(item, style));
    if (value === null || typeof value !== "object") return value;
    const made = {};
    for (const [key, item] of Object.entries(value)) {
      const named = key.endsWith("color") && typeof item === "string" && item.startsWith("--");
      made[key] = named ? style.getPropertyValue(item).trim() : coloured(item, style);
    }
    return made;
  }

  // The looks that all charts share.
  const font = { family: "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Liberation Sans', sans-serif", size: 12.5 };
  const axis = {
    title: { standoff: 12, font: { size: 12.5 } }, automargin: true, zeroline: false, showline: true, ticks: "outside",
    gridcolor: "--grid", linecolor: "--line", tickcolor: "--line",
  };
  const template = {
    layout: {
      font: { ...font, color: "--faint" }, paper_bgcolor: "--paper", plot_bgcolor: "--paper",
      margin: { l: 8, r: 12, t: 8, b: 8, pad: 0 }, hovermode: "closest",
      hoverlabel: { bgcolor: "--card", bordercolor: "--line", font: { ...font, color: "--ink" }, align: "left", namelength: 0 },
      showlegend: true,
      legend: {
        orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom",
        font: { color: "--ink" }, bgcolor: "--paper",
      },
      xaxis: { ...axis, showgrid: false },
      yaxis: axis,
    },
    data: {
      scatter: [{ hoverinfo: "text", line: { width: 2 }, marker: { size: 6 } }],
      bar: [{ hoverinfo: "text", marker: { line: { width: 0 } } }],
    },
  };

  function draw(name) {
    const figure = figures[name];
    const style = getComputedStyle(root);
    const { data, layout } = coloured({ data: figure.data, layout: { ...figure.layout, template } }, style);
    // A finger that drags scrolls the page; a mouse that drags zooms.
    layout.dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";
    const config = { responsive: true, displayModeBar: false, displaylogo: false, showTips: false };
    return Plotly.react(document.getElementById("plot-" + name), data, layout, config);
  }

  function press(buttons, pressed) {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button === pressed));
  }

  // plotly.js, unpacked into a script of its own, which the page's policy knows by its hash.
  async function startPlotly() {
    const letters = atob(document.getElementById("plotly").textContent);
    const packed = new Uint8Array(letters.length);
    for (let place = 0; place < letters.length; place += 1) packed[place] = letters.charCodeAt(place);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  const pause = () => new Promise((resolve) => setTimeout(resolve));

  async function drawAll() {
    root.classList.add("charts");
    try {
      await pause();
      await startPlotly();
      for (const name of Object.keys(figures)) {
        await draw(name);
        // Between two charts the reader may scroll.
        await pause();
      }
      root.dataset.drawn = Object.keys(figures).length;
    } catch (error) {
      root.classList.remove("charts");
      throw error;
    }
  }

  scheme.addEventListener("change", () => { if (root.dataset.drawn) Object.keys(figures).forEach(draw); });

  // Configs: one at a time, and a button that copies it.
  const configs = [...document.querySelectorAll(".config")];
  const choices = [...document.querySelectorAll("[data-config]")];
  function choose(index) {
    configs.forEach((config, place) => { config.hidden = place !== index; });
    press(choices, choices[index]);
  }
  choices.forEach((choice, index) => choice.addEventListener("click", () => choose(index)));
  if (choices.length) {
    choices[0].parentElement.hidden = false;
    for (const heading of document.querySelectorAll(".config h3")) heading.hidden = true;
    choose(0);
  }

  // A page that was opened from a file may have no clipboard, or no right to it.
  function copyByHand(text) {
    const area = document.createElement("textarea");
    area.value = text;
    area.style.position = "fixed";
    area.style.opacity = "0";
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }

  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      return copyByHand(text);
    }
  }

  for (const button of document.querySelectorAll(".copy")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const pre = button.parentElement.querySelector("pre");
      const copied = await copy(pre.textContent);
      button.focus();
      button.textContent = copied ? "Copied" : "Select it and copy";
      if (!copied) getSelection().selectAllChildren(pre);
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }

  if (holder) drawAll();
})();
