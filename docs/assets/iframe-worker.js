// A page that is read from disk may start no Worker: there, the search's runs in a hidden frame of the page.
if (location.protocol === "file:") {
  window.Worker = class {
    onmessage = null
    onerror = null
    onmessageerror = null

    constructor(url) {
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      inside.postMessage = (data) => setTimeout(() => this.onmessage?.({ data }))
      const script = inside.document.createElement("script")
      script.src = new URL(url, location)
      this.loaded = new Promise((resolve, reject) => {
        script.onload = resolve
        script.onerror = reject
      })
      this.loaded.catch((error) => this.onerror?.(error))
      inside.document.body.append(script)
    }

    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow?.onmessage({ data: structuredClone(data) }), () => {})
    }

    terminate() {
      this.frame.remove()
    }
  }
}
