// Package devstack runs a real MongoDB replica set and a real Kafka cluster on this machine, for the
// developer's demo and for tests. It uses servers named by the environment, or programs on the PATH or in
// its cache. It fetches missing programs once, and falls back to a Docker engine.
//
//	progress := devstack.Lines(os.Stderr)
//	s, err := devstack.Start(ctx, devstack.Options{Mongods: 3, Brokers: 3, Quick: true, Progress: progress})
//	defer s.Stop()                                   // kills all members and removes the data: 0.1 s
//	use(s.MongoURI(), s.Brokers())                   // topics are not created automatically
//	p, err := s.Primary(ctx)                         // a *Member; also s.Mongods(), s.Kafkas(), s.Leader(ctx, topic, 0)
//	p.Kill(); p.Pause(); p.Resume(); p.Shutdown()    // SIGKILL, SIGSTOP, SIGCONT, SIGTERM
//	p.Restart(ctx)                                   // same address and data; blocks until it serves
//	s.MoveLeader(ctx, topic, 0, 2)                   // partition 0 to broker 2
//
// [FindBrowser] finds or fetches a headless Chromium in the same way. [Clean] removes all fetched
// programs.
//
// Tests use it through package stacktest. MongoURI, Brokers and Topic use one stack that all test processes
// of the machine share. stacktest.Own(tb, Options) starts a stack that the test may break.
//
// Promises: on two cores, a start takes 1 to 2 s for single members, and 3 to 4 s for three of each. Before
// the first start it fetches about 100 MB, in about 15 s. Parallel processes fetch once. When the process
// that called Start ends, also by a panic, Ctrl-C or kill -9, its members end too and their data is removed.
//
// Limits: data does not outlive Stop. MongoDB and Kafka keep their default durability. The servers are not
// reachable from other machines.
package devstack
