// Package examine reads all virtual hosts of a cluster, and checks them by the rules of package
// rules and by more that need a running cluster or judge any application's topology.
package examine
