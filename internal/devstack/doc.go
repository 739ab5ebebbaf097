// Package devstack runs a real MongoDB replica set and a real Kafka on this machine, for the
// developer's demo and for tests. It finds servers named by the environment, programs on the PATH or
// in its cache, fetches what is missing once, and falls back to a Docker engine.
//
//	s, err := devstack.Start(ctx, devstack.Options{Mongods: 3, Brokers: 3, Quick: true, Progress: devstack.Lines(os.Stderr)})
//	defer s.Stop()                                   // kill -9 of all, data removed: 0.1 s
//	use(s.MongoURI(), s.Brokers())                   // topics are never created by themselves
//	p, err := s.Primary(ctx)                         // a *Member; also s.Mongods(), s.Kafkas(), s.Leader(ctx, topic, 0)
//	p.Kill(); p.Pause(); p.Resume(); p.Shutdown()    // SIGKILL, SIGSTOP, SIGCONT, SIGTERM
//	p.Restart(ctx)                                   // same address, same data; returns when it serves
//	s.MoveLeader(ctx, topic, 0, 2)                   // partition 0 to broker 2
//
// [FindBrowser] finds or fetches a headless Chromium in the same way, and [Clean] removes everything that
// was fetched.
//
// Tests take it through package stacktest: MongoURI, Brokers and Topic use one stack that all test
// processes of the machine share; stacktest.Own(tb, Options) starts a stack that the test may break.
//
// Promises: a start takes 1 to 2 s for single members and 3 to 4 s for three and three on two cores,
// once the programs are fetched (about 100 MB and 15 s); parallel processes fetch once. Whatever ends
// the process that called Start (a panic, Ctrl-C, kill -9), its members end too and their data is
// removed. Not promised: data does not outlive Stop, and nothing here is tuned for durability of its
// own (MongoDB and Kafka keep their defaults) or reachable from other machines.
package devstack
