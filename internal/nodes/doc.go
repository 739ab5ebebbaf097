// Package nodes is the registry of the processes of a deployment: `nodes` of the state database, with one document for each,
// and what goes into the events log about them.
//
// A [Member] is this process in it: listed by its first heartbeat, listed again as what it was if somebody removes it, taken
// off when it stops. Whether a node lives is judged by the server's clock alone, so a process whose own clock is wrong is as
// alive as its heartbeats are young. After [StaleAfter] of silence another node notes it, once, in the events log; leases are
// nobody's business here, they expire by themselves. Nodes never talk to each other: MongoDB is the only place where they
// meet, and no node has to reach another.
//
// [Ready] guards rolling upgrades. Every node tells the number of the last migration that it knows ([migrate.Schema]). A
// migration which older versions cannot work with waits until every node that lives, and every owner of a lease, knows it;
// one that is begun keeps older nodes from starting.
//
// A heartbeat is one small write. Every call blocks until its statement is answered or its context ends; nothing here starts
// a goroutine, and what it cannot do harms no delivery.
package nodes
