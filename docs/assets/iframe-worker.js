// A page that was opened from disk may not start a worker, which the search of the site wants. There a
// hidden frame takes its place. Material for MkDocs looks for the name IFrameWorker.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      this.ready = new Promise((resolve) => frame.addEventListener("load", resolve)).then(() => {
        const inside = frame.contentWindow;
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        return inside;
      });
      frame.hidden = true;
      frame.srcdoc = `<script src="${new URL(url, location)}"></script>`;
      document.body.append(frame);
    }

    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
