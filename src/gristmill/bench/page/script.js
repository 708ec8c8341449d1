(function () {
  "use strict";
  var root = document.documentElement;
  var button = document.getElementById("theme");
  var system = matchMedia("(prefers-color-scheme: dark)");

  function isDark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
  }
  function label() {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", "Switch to the " + (isDark() ? "light" : "dark") + " theme");
  }
  button.hidden = false;
  button.addEventListener("click", function () {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("gristmill-theme", root.dataset.theme);
    } catch (refused) {
      // Then it holds for this view.
    }
    label();
  });
  system.addEventListener("change", label);
  label();

  // A link to rows that are folded away opens their fold.
  function unfold() {
    var there = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    var fold = there && there.closest("details");
    if (!fold) return;
    fold.open = true;
    there.scrollIntoView();
  }
  addEventListener("hashchange", unfold);
  unfold();

  // Where the clipboard is out of reach, the command is at least selected, for a copy by hand.
  function select(code) {
    var range = document.createRange();
    range.selectNodeContents(code);
    var selection = getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
  }
  function copy(code, done) {
    function byHand() {
      select(code);
      done(document.execCommand("copy") ? "copied" : "selected");
    }
    if (!navigator.clipboard) return byHand();
    navigator.clipboard.writeText(code.textContent).then(function () {
      done("copied");
    }, byHand);
  }
  document.querySelectorAll("code.cmd").forEach(function (code) {
    var one = document.createElement("button");
    one.type = "button";
    one.className = "copy";
    one.textContent = "copy";
    one.setAttribute("aria-label", "Copy this command");
    code.after(" ", one);
  });
  document.addEventListener("click", function (event) {
    var one = event.target;
    if (!(one instanceof HTMLButtonElement) || one.className !== "copy") return;
    copy(one.previousElementSibling, function (what) {
      one.textContent = what;
      setTimeout(function () {
        one.textContent = "copy";
      }, 1500);
    });
  });
})();
