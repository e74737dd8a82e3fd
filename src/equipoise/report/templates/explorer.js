// The routing explorer: which layer is shown, and every number of the token under the pointer or the focus.
// It reads only what the page shows already, and writes text, classes and titles: never markup.
(function () {
  "use strict";
  var root = document.getElementById("explorer");
  var picker = root && root.querySelector(".picker");
  if (!picker) return;
  var shades = picker.dataset.shades.split(" ").map(Number);
  var colours = Number(picker.dataset.colours);
  var shown = "0";

  function routes(token, layer) {
    var layers = token.dataset.r ? token.dataset.r.split("|") : [];
    return layer < layers.length ? layers[layer].split(" ").map(function (pair) { return pair.split(":"); }) : [];
  }

  function said(token) {
    var pairs = shown === "loss" ? [] : routes(token, Number(shown));
    var experts = pairs.map(function (pair) { return "expert " + pair[0] + " at " + pair[1]; });
    return "loss " + token.dataset.l + (pairs.length ? "; layer " + shown + ": " + experts.join(", ") : "");
  }

  function paint(token) {
    var pairs = shown === "loss" ? [] : routes(token, Number(shown));
    var hundredths = Math.round(100 * Number(token.dataset.l));
    var shade = shades.filter(function (least) { return hundredths >= 100 * least; }).length;
    token.className = "tk " + (pairs.length ? "x" + (Number(pairs[0][0]) % colours) : "s" + shade);
    token.title = said(token);
    token.querySelector("sub").textContent = pairs.length
      ? pairs.map(function (pair) { return pair[0]; }).join(" ")
      : (Math.floor((hundredths + 5) / 10) / 10).toFixed(1);
  }

  function element(tag, text) {
    var made = document.createElement(tag);
    made.textContent = text;
    return made;
  }

  Array.prototype.forEach.call(root.querySelectorAll(".story"), function (story) {
    var readout = story.querySelector(".readout");
    var columns = Array.prototype.map.call(story.querySelectorAll(".column"), function (column) {
      return {
        name: column.querySelector(".who bdi").textContent,
        tokens: Array.prototype.slice.call(column.querySelectorAll(".tk")),
      };
    });

    function tell(place, text) {
      while (readout.firstChild) readout.removeChild(readout.firstChild);
      readout.classList.add("told");
      readout.appendChild(element("b", "\u201c" + text + "\u201d"));
      columns.forEach(function (column) {
        column.tokens.forEach(function (token, index) { token.classList.toggle("on", index === place); });
        if (column.tokens[place]) {
          readout.appendChild(element("span", column.name + ": " + said(column.tokens[place])));
        }
      });
    }

    readout.hidden = false;
    readout.textContent = "Point at a token, or tab to it and use the arrow keys.";
    columns.forEach(function (column) {
      column.tokens.forEach(function (token, place) {
        var text = token.querySelector("bdi").textContent;
        token.tabIndex = place ? -1 : 0;
        token.addEventListener("mouseenter", function () { tell(place, text); });
        token.addEventListener("focus", function () {
          column.tokens.forEach(function (other) { other.tabIndex = other === token ? 0 : -1; });
          tell(place, text);
        });
        token.addEventListener("keydown", function (event) {
          var last = column.tokens.length - 1;
          var goes = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: last };
          if (!Object.prototype.hasOwnProperty.call(goes, event.key)) return;
          event.preventDefault();
          column.tokens[Math.min(last, Math.max(0, goes[event.key]))].focus();
        });
      });
    });
  });

  picker.hidden = false;
  picker.addEventListener("change", function (event) {
    shown = event.target.value;
    Array.prototype.forEach.call(root.querySelectorAll(".story .tk"), paint);
  });
})();
