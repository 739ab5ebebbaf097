package stacktest

import "time"

// joinedFor is how long goroutines that were told to end may take: a connection that was closed ends its own a little later, and
// on a loaded machine one is not run for seconds.
const joinedFor = 20 * time.Second

// Joined gives what the tests started some time to end before goleak, which has less than half a second of patience, looks at
// what is left. For TestMain:
//
//	goleak.VerifyTestMain(stacktest.Joined(m, func() error { return goleak.Find() }))
func Joined(m interface{ Run() int }, left func() error) interface{ Run() int } {
	return joined{m.Run, left}
}

type joined struct {
	run  func() int
	left func() error
}

// Run runs the tests.
func (j joined) Run() int {
	code := j.run()
	// A test that failed may well leave something.
	for end := time.Now().Add(joinedFor); code == 0 && j.left() != nil && time.Now().Before(end); {
		continue // it has waited for a while itself
	}
	return code
}
