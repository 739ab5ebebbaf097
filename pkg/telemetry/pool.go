package telemetry

import (
	driver "go.mongodb.org/mongo-driver/v2/event"

	"github.com/outrelay/outrelay/internal/mongodb/pool"
)

// MonitorPool returns a monitor of the connections of a client to MongoDB, which passes [Connections], [Checkout] and
// [CheckoutFailed] to sink:
//
//	options.Client().ApplyURI(uri).SetPoolMonitor(telemetry.MonitorPool(sink, nil))
//
// next is another monitor, which gets every event first, or nil. Each client needs a monitor of its own. Cost: a lock and a
// few measurements for each call to MongoDB.
func MonitorPool(sink Sink, next *driver.PoolMonitor) *driver.PoolMonitor {
	var last pool.Figures
	return pool.Monitor(next, func(figures pool.Figures, ended *pool.Checkout) {
		measure := func(state string, before, now int64) {
			if before != now {
				sink.Measure(Measurement{Metric: Connections, Reason: state, N: now})
			}
		}
		measure("open", last.Open, figures.Open)
		measure("in_use", last.InUse, figures.InUse)
		measure("waiting", last.Waiting, figures.Waiting)
		last = figures

		switch {
		case ended == nil:
		case ended.Failed != "":
			sink.Measure(Measurement{Metric: CheckoutFailed, Reason: ended.Failed, N: 1})
		default:
			sink.Measure(Measurement{Metric: Checkout, Took: ended.Took, N: 1})
		}
	})
}
