package lease

import "time"

var processStart = time.Now()

func monotonic() time.Duration { return time.Since(processStart) }

// guardTime returns how long before the expiry work stops, so that everything sent until then has ended when the lease
// expires. If a request takes longer, the fences of MongoDB and Kafka still reject it.
func guardTime(ttl time.Duration) time.Duration { return ttl / 5 }
