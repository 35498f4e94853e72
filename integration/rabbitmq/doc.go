// Package rabbitmq gives integration tests and examples a real RabbitMQ, on any
// machine, in the versions that hopback supports, 4.0 to 4.4, side by side.
//
//	func TestMain(m *testing.M) {
//		brokers, err := broker.Need(context.Background(), os.Stderr, "4.3", "4.0")
//		if err != nil {
//			fmt.Fprintln(os.Stderr, err)
//			os.Exit(1)
//		}
//		code := m.Run()
//		for _, b := range brokers {
//			_ = b.Release(context.Background())
//		}
//		os.Exit(code)
//	}
//
// # Where a broker comes from
//
// The first of these that works, for each version on its own:
//
//  1. The environment ([Environment]): HOPBACK_URL_4_3 or HOPBACK_URL_4_0 is
//     the amqp:// URL of a broker that runs already. Its HTTP API is taken to
//     be http://HOST:15672; HOPBACK_MANAGEMENT_URL_4_3 (or _4_0) says otherwise.
//     It is used and never stopped. HOPBACK_TREE_4_4 is the folder of a system with RabbitMQ 4.4
//     installed by a Debian package, which brokers are started from as from a tree: see 3.
//  2. Docker with the official image ([Docker]), by the docker-compose.yml at
//     the top of the module.
//  3. A tree of Debian's packages in a chroot ([Chroot]), as root on Linux, with
//     separate mount and pid namespaces, so that nothing is left when it stops.
//     Sites which no image registry can be reached from take this way.
//  4. Docker with an image built from the same tree ([HowDockerBuilt]); the same
//     compose file. It takes twice as long to start, so it is for those who
//     aren't root, and for clusters, whose nodes need networks of their own.
//
// Otherwise the answer is a [NoWayError], which says what was tried.
//
// Brokers that this package starts listen on loopback addresses only. Image trees, data
// and the record of what runs are kept in hopback/broker of the user's cache
// folder ([os.UserCacheDir]), and nowhere else but in Docker itself, and in memory where
// HOPBACK_BROKER_LEAN says so.
//
// # Who ends it
//
// A broker is shared by all processes that ask for its version, such as the
// test binaries that "go test ./..." runs at the same time: the last one that
// releases it ends it. One started by the command (broker up) is kept until
// "broker down". A test that kills its broker should not share it: see [Own].
//
// # Environment
//
//	HOPBACK_URL_4_4, HOPBACK_URL_4_3, ...                        see above
//	HOPBACK_MANAGEMENT_URL_4_4, HOPBACK_MANAGEMENT_URL_4_3, ...  see above
//	HOPBACK_TREE_4_4, ...                                        see above
//	HOPBACK_BROKER_WITH  take this way only: env, docker, chroot or docker-built
//	HOPBACK_KEEP         if not empty, Release leaves the broker running
//	HOPBACK_BROKER_LEAN  if not empty, brokers are started so that they take a third
//	                     less CPU, for tests that share few cores with them: on one
//	                     thread and, in a chroot, with data in memory if 4 GiB are free
//	                     there. Not for measuring.
package rabbitmq
