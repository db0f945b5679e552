// The search runs in a worker, which browsers do not start for a page opened from a folder: there, a hidden frame
// takes its place.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      this.listen = (event) => {
        if (event.source === inner) this.onmessage?.(event);
      };
      addEventListener("message", this.listen);
      inner.document.open(); // forgets listeners
      const answer = "<script>postMessage = (data) => parent.postMessage(data, '*')</script>";
      inner.document.write(`<body>${answer}<script src="${url}"></script></body>`);
      this.ready = new Promise((loaded) => inner.addEventListener("load", loaded));
      inner.document.close();
      inner.onerror = (message) => this.onerror?.(new ErrorEvent("error", { message, cancelable: true }));
    }
    postMessage(data) {
      const inner = this.frame.contentWindow;
      const message = new MessageEvent("message", { data: structuredClone(data) });
      this.ready.then(() => setTimeout(() => inner.dispatchEvent(message)));
    }
    terminate() {
      removeEventListener("message", this.listen);
      this.frame.remove();
    }
  };
}
