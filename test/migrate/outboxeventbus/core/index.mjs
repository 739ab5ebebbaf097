// The parts of outbox-event-bus that its MongoDB adapter and its Kafka publisher use. The npm registry has these two packages, but not
// the core that they import.
export const EventStatus = { CREATED: "created", ACTIVE: "active", FAILED: "failed", COMPLETED: "completed" };

export const formatErrorMessage = (error) => (error instanceof Error ? error.message : String(error));

export function reportEventError(onError, error) {
  onError?.(error);
}

// PollingService calls processBatch again and again, and waits in between.
export class PollingService {
  constructor(config) {
    this.config = config;
  }

  start(handler, onError) {
    this.onError = onError;
    this.running = true;
    this.loop = this.poll(handler);
  }

  async poll(handler) {
    while (this.running) {
      await this.config.processBatch(handler).catch((error) => this.onError?.(error));
      await new Promise((resolve) => setTimeout(resolve, this.config.pollIntervalMs));
    }
  }

  calculateBackoff(retryCount) {
    return this.config.baseBackoffMs * 2 ** (retryCount - 1);
  }

  async stop() {
    this.running = false;
    await this.loop;
  }
}

// EventPublisher passes each event to the handler of its publisher.
export class EventPublisher {
  constructor(bus) {
    this.bus = bus;
  }

  subscribe(types, send) {
    this.bus.subscribe(types, (event) => send([event]));
  }
}
