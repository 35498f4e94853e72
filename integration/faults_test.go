package integration

// A fault is one that was found and reproduced: in hopback, in RabbitMQ, or in another client.
type fault struct {
	// what happened, and what it cost.
	what string
	// where says what fixed it: the hash or the first line of a commit of this repository, or, for
	// the faults of others, the versions in which it was seen.
	where string
	// tests fail if it comes back, or if hopback no longer copes with it. One whose name is in
	// several folders has its folder before it, and a dot.
	tests string
}

// A chapter is a table of docs/faults.md.
type chapter struct {
	title, intro, where string
	faults              []fault
}

// faults is the one list of them. docs/faults.md is written from it:
//
//	go test ./integration -run TestFaults -update
var faults = []chapter{
	{
		title: "hopback: found by attacks",
		intro: "Attacks from outside found these in November 2026. Most need somebody else: another team, an operator, a broken node, a proxy.",
		where: fixedBy,
		faults: []fault{
			{"A message of 2 MB whose nested lists claimed too many elements took over 3 GB. Any publisher could kill its consumers.", "Repairs…", "TestMessagesThatCannotBeDecodedHarmNoOthers TestAValueCostsASmallMultipleOfItsSize"},
			{"A message of nothing but small maps took 100 times its size.", "Repairs…", "TestManySmallMapsAreUndecodable"},
			{"A peer that asked for answers and didn't read them filled the memory: 793 MB in 20 s.", "Repairs…", "TestAnswersToAPeerThatDoesNotReadAreBounded"},
			{"Limits counted messages, not bytes: an export of 2,000 messages of 200 kB took 878 MB.", "Repairs…", "TestMaxBytes TestAConsumerHoldsAtMostItsBytes"},
			{"`dlq discard --to` never got anywhere if the disk had less room than one batch.", "Repairs…", "TestDiscardToAFullDisk"},
			{"Queues that were never empty kept room for all that had passed: 3 entries, room for 119,808.", "Repairs…", "TestASendersQueueIsAsLargeAsWhatWaits TestAQueueThatIsNeverEmptyDoesNotGrow"},
			{"After a reshard, any other queue bound to a partition group's exchange took all messages: 200 of 200 lost, `Publish` returned nil.", "Repairs…", "TestAForeignBindingTakesNothingFromAGroup"},
			{"A queue bound to `dead_letter_exchange` took every team's dead letters: 20 of 20.", "Repairs…", "TestAForeignBindingTakesNoDeadLetters TestAnOlderTopologyOfDeadLettersWorks"},
			{"Old definitions, imported again after a reshard, routed 100 of 100 messages to queues that nobody reads.", "Repairs…", "TestAGroupSurvivesOldDefinitions TestMessagesInOldQueuesAreMoved"},
			{"`Reshard` never ended while one key was blocked, and all other keys waited.", "Repairs…", "TestReshardDoesNotWaitForABlockedKey TestReshardCanBeKilledAtEveryStep"},
			{"One message that crashes workers had 84 healthy neighbors dead-lettered, and far from the broker 6 more later: their settlements died with the worker.", "Repairs…", "TestAPoisonMessageTakesNoNeighborAlong TestACrashIsBlamedOnNoMessageBeforeIt"},
			{"Lost connections used up the delivery limit: 60 of 60 messages dead-lettered, 59 never handled.", "Repairs…", "TestLostConnectionsCondemnNoMessage"},
			{"A node that stayed down left half of the partitions without a worker for 60 s.", "Repairs…", "TestANodeStaysDown"},
			{"After their exchange was declared again, workers didn't hear each other: a new one got no partition.", "Repairs…", "TestWorkersHearEachOtherAgain"},
			{"A forwarded copy kept the key of its original, so two handlers worked on one key.", "Repairs…", "TestForwardedCopiesKeepTheOrderOfTheirKey"},
			{"If the function that chooses a key panicked, the message was handled next to others, silently.", "Repairs…", "TestAMessageWithoutAKeyIsNotHandled"},
			{"A policy with `delayed-retry-type` reordered partitions unnoticed. It still does, and it is logged.", "Repairs…", "TestAPolicyThatReordersIsNoticed"},
			{"A partition worker whose clock was off dead-lettered its predecessor's messages after 4 s, and halved delays.", "Repairs…", "TestAWorkersClockIsOff"},
			{"A worker that hadn't learned the broker's time guessed it from late messages: native retries came up to 200 ms early.", "Repairs…", "TestALateMessageIsNoSignOfTheClockWhileTheBrokerMayStillTellItsTime TestTheBrokerIsAskedForItsTimeUntilItAnswers"},
			{"A scheduled message came early by as long as the question for the broker's time had taken, or by 50 ms.", "Repairs…", "TestNoMessageIsEarlyBecauseTheBrokersTimeIsLate"},
			{"A forged marker annotation had an ordinary message acknowledged unhandled.", "Repairs…", "TestForgedMarkersAreHandled"},
			{"Workers with retries couldn't start during an alarm, so nobody drained the backlog that had caused it.", "Repairs…", "TestAConsumerWithRetriesStartsDuringAnAlarm TestWorkersWithRetriesStartDuringAnAlarm"},
			{"A publish that a topic permission forbids was reported as unknown.", "Repairs…", "TestAPublishThatATopicPermissionForbids TestAForbiddenTopicHarmsNoOtherMessage"},
			{"One reset during an additional connection's opening was reported as a limit, and ended `Consume`.", "Repairs…", "TestAResetWhileAFurtherConnectionOpensIsNoLimit"},
			{"`SafeToRetry` was true for what can never succeed. `WorthRetrying` answers that question.", "Repairs…", "TestTheTableOfKindsIsRight"},
			{"A message that was never sent was reported as unknown, in 8 of 600 runs.", "Repairs…", "TestWithdrawBetweenTheLinksEndAndTheAnswer"},
			{"`Close` returned nil although a message had no answer.", "Repairs…", "TestCloseReportsAMessageWithoutAnAnswerWhoseCallerHasLeft"},
			{"Connection errors blamed the password, the port, or a setting that had nothing to do with it.", "Repairs…", "TestWhyAConnectionIsNotOpened TestAURLThatIsWrongSaysHow"},
			{"A broker with `frame_max` 0, or one session per connection, was blamed on `MaxConnections`.", "Repairs…", "TestABrokerThatAcceptsNoFrames TestABrokerThatAllowsOneSessionOnAConnection"},
			{"If the first address of a host name accepted connections and stayed silent, the others were never tried.", "Repairs…", "TestAnAddressThatDoesNotAnswerIsPassedOver"},
			{"A copy forwarded to another queue kept its retry count, and was dead-lettered there at its first failure.", "Repairs…", "TestAForwardedCopyStartsOver"},
			{"A message published to `new.orders` kept the count of `orders`.", "Repairs…", "TestReturnedIsWhatADelayBroughtBack"},
			{"Waiting messages lost their count while their queue was migrated.", "Repairs…", "TestMigrateInEverySituation TestReturnedIsWhatADelayBroughtBack"},
			{"`After(1h)` with delays of 1 s passed through the broker 3,600 times.", "Repairs…", "TestALongDelayPassesFewQueues"},
			{"`typemux` didn't see the type of AMQP 0-9-1: 19 of 19 messages dead-lettered.", "Repairs…", "TestTheTypeOfAnAMQP091MessageFindsItsHandler TestWhatBecomesOfAMQP091Properties"},
			{"Replays dropped tables and arrays in the headers of AMQP 0-9-1 messages.", "Repairs…", "TestHeadersOfAMQP091AreNotLostInSilence"},
			{"A stream that was deleted and declared again was read from the middle: 51 of 105 messages skipped.", "Repairs…", "TestAPositionBelongsToOneStream"},
			{"After a node was killed, a stream consumer took a replica that was behind for another stream.", "Repairs…", "TestAReplicaThatLagsStopsNoConsumer"},
			{"After a node was killed, a stream consumer waited forever without a log line.", "Repairs…", "TestAStreamWithoutAReplicaIsTriedAgain TestAStreamThatFallsSilentIsReadOn"},
			{"A retry policy within another one was accepted; `dedupe` around a policy swallowed its retries.", "Repairs…", "TestNestedPoliciesAreRefused TestARetryIsNeverDone"},
			{"One policy pattern that Go can't parse disabled 30 rules of `doctor`, with exit code 0.", "Repairs…", "TestAPolicyWithALookAhead TestPatternsOfPoliciesMatchAsOnABroker"},
			{"`doctor` reported errors on every export of 3.x, and misread default queue types and UTF-16.", "Repairs…", "TestAnExportOf3x TestAFileIsWhatTheBrokerReads"},
			{"Advice of `doctor` broke old queues, or the next reshard.", "Repairs…", "TestEveryRemedyIsApplied TestDoctorNamesWhatDoesHarm"},
			{"`--timeout` didn't cover the analysis: 4,000 queues took 176 s, now 0.3 s.", "Repairs…", "TestLargeDefinitionsTakeLittleTime TestTheAnalysisEndsWithItsTime"},
			{"An HTTP API that answers `null` everywhere was a broker without findings.", "Repairs…", "TestAnAPIThatSaysNothing"},
			{"A stock nginx in front of a desk opened it to the network.", "Repairs…", "TestNginxInFrontOfADeskLetsNobodyIn"},
			{"A replay ended when the broker restarted; `--max` ignored failures.", "Repairs…", "TestAReplayContinuesAfterARestartOfTheBroker TestMaxCountsWhatCanNotBeSent"},
			{"A mistyped URL showed a part of the password.", "Repairs…", "TestAMistypedURLShowsNoPartOfThePassword TestMistypedURLsShowNoPartOfThePassword"},
			{"A consumer whose prefetch equals its concurrency wrote a flow frame for each message.", "Repairs…", "TestCreditIsGathered"},
			{"An idle consumer that had retried held 79 kB and 5 goroutines.", "Repairs…", "TestIdleConsumersHoldLittle"},
			{"A delay between two partition workers was cut short by the time a message takes to the broker.", "Repairs…", "TestADelayIsNotCutShortByAnotherWorkersClock"},
		},
	},
	{
		title: "hopback: found by seeds and cuts",
		intro: "Chaos, the broker in memory, and tests that cut a connection at every step found these. Sequences in which the broker in memory differed from RabbitMQ are in " +
			"`integration/differ/found_test.go`.",
		where: fixedBy,
		faults: []fault{
			{"A queue that didn't answer ended its connection every 15 s, with all other consumers on it.", "6d86b96", "TestAQueueThatDoesNotAnswerHurtsNobodyElse"},
			{"A consumer that started while its connection ended, stopped instead of starting again.", "fce04a0", "TestAConsumerStartsWhereverTheConnectionEnds"},
			{"The broker in memory kept a consumer active where RabbitMQ 4.0 leaves none, so tests in memory passed for the wrong reason.", "d53013b", "TestNoConsumerIsActiveOnceALastMessageWasGivenBack TestFoundSequencesComeToTheSame"},
			{"In an alarm, requests whose handlers succeeded became dead letters: a reply that waits counted as a failure.", "4e30565", "TestAReplyThatIsNotAcceptedIsNoFailedAttempt"},
			{"A session on a connection that had just been closed in order was nil, and the caller panicked.", "e0f510b", "TestNoSessionOnAConnectionThatWasClosedInOrder"},
		},
	},
	{
		title: "hopback: found by exploration",
		intro: "Tests named `TestExplore…` try every order of a few messages, workers, refusals, and crashes with the product's own functions " +
			"([integration/explore](../integration/explore/explore.go)).",
		where: fixedBy,
		faults: []fault{
			{"A worker of the old generation declared a binding again that a `Reshard` had removed since it asked: messages of that moment had no route.", "Repairs…", "TestExploreRoutes TestExploreRoutesFindsPlantedFaults"},
			{"A message whose copy for the rest of its delay was refused came early.", "Repairs…", "TestExploreRetries"},
			{"A forwarded message whose retry copy was refused had its first queue's retries, and was dead-lettered early.", "Repairs…", "TestAMessageWhoseCopyIsRefusedKeepsItsCount"},
		},
	},
	{
		title: "hopback: found by tests on brokers, and by reading",
		where: fixedBy,
		faults: []fault{
			{"A pause of recurring messages was lost if their group had two tokens for a time, and both were edited.", "Repairs…", "TestAPauseSurvivesEditsOfAnotherToken TestAPauseSurvivesAWorkerThatSawTwoTokens"},
			{"A message taken from the queue as its link was lost stayed unsent.", "371b87a", "TestAMessageTakenFromTheQueueAsTheLinkIsLostIsKept"},
			{"Messages sent again after a reconnect changed their order if others had been withdrawn.", "cab3646", "TestOrderIsKeptWhenCallersHaveTakenMessagesBack"},
			{"What a lost link hadn't accepted any more was reported as unknown.", "d96c23a", "TestAMessageThatALostLinkDidNotTakeIsNotSent"},
			{"A binary key in a footer, which RabbitMQ passes on, was a panic.", "9dcac6e", "TestWhatIsNotDecodable"},
			{"With an `IdleTimeout` above RabbitMQ's `heartbeat`, a silent worker kept its partitions after another had them.", "d489389", "TestAnAnswerIsAwaitedForLessThanHeartbeat TestASilentWorkerHasItsPartitionsUntilRabbitMQNotices"},
			{"A retry that waited 0.2 s in its queue made a worker drop its guess of the broker's clock: ten minutes of late retries.", "007f0c4", "TestALittleDelayIsNoReasonToDropAGuess"},
			{"A process that was interrupted while it read the broker's clock made retries early.", "3ba1c1b", "TestReadIsNeverTooEarly"},
			{"A broker that ended while an additional connection opened was reported as a limit of connections.", "09fa368", "TestARefusedFurtherConnectionHurtsNobodyElse"},
			{"`Consume` returned during a reconnect while handlers still ran.", "e23f815", "TestConsumerWaitsForHandlersOfALostLink"},
			{"An outcome returned as a pointer was never settled.", "60ba9c0", "TestConsumerCarriesOutOutcomes"},
			{"A forged delivery time disabled native delays for the whole queue.", "8502351", "TestForgedDeliveryTimeTouchesNoOtherMessage"},
			{"A rejection by a worker in another language circled through the delay queues forever.", "8502351", "TestForeignRejectionAfterAWaitIsADeath"},
			{"A ladder shortened delays that were longer than its longest.", "6f8d755", "TestLongerDelaysAreNeverHeldShorter TestPolicyRefusesDelaysBeyondItsLadder"},
			{"Errors about a URL repeated a password with unescaped characters.", "6bc1bf5", "TestBadURLIsRefusedWithoutRepeatingThePassword"},
			{"`Close` of a publisher waited for a silent broker.", "a47b41f", "TestCloseEndsWhenTheBrokerDoesNotAnswer"},
			{"Management requests overdrew the credit for their replies, for which RabbitMQ 4.0 ends the session.", "3da2acc", "TestManagementRequestsOvertakeTheCreditForTheirReplies"},
			{"A scheduled message for a queue that didn't answer delayed all others.", "1f47fca", "TestDispatchWaitsForASilentQueueAndForNoOther"},
			{"The outbox's relay counted what the broker lacked or forbade as failures of messages.", "6a9073f", "TestWhatTheBrokerLacksIsHeldAgainstNoMessage"},
		},
	},
	{
		title: "RabbitMQ",
		intro: "RabbitMQ 4.0.5, 4.3.6, and a preview of 4.4 did these. [rabbitmq-notes](../integration/rabbitmq-notes.md) has more facts, and [operations](operations.md) says what " +
			"operators can do. The tests show the fault, or that hopback copes.",
		where: "seen in",
		faults: []fault{
			{"A quorum queue that is younger than 3 s comes back empty after a kill, without its confirmed messages. `declare.Persist` prevents that.", "4.0, 4.3", "TestAPersistedQueueSurvivesAKill TestPersistHasTheBrokerWriteNewQueuesDown"},
			{"After a queue's leader was frozen, it ignores a session's credit, settlements, and messages. hopback opens a new session.", "before 4.0.6", "TestConsumerThatTheBrokerForgotHasItsSessionReplaced"},
			{"A queue hangs forever if it drops its oldest messages while more messages wait than it may hold. From 4.4 on, any publisher can cause that.", "4.3, 4.4", "integration/differ.TestAQueueWithMoreDelayedThanItMayHoldHangs TestPublishersForLaterHangAQueueThatDropsItsHead"},
			{"At-least-once dead-lettering stops for all once 32 messages of a queue can't be delivered.", "4.0, 4.3", "TestAtLeastOnceStallsBehindAFullQueue"},
			{"A dead letter that one target has is kept forever if a full one is unbound; 32 stop the queue.", "4.0, 4.3", "TestDeadLettersOfAQueueThatWasUnboundAreKept"},
			{"What couldn't be dead-lettered is tried again after 180 s, so a retry after a repair is that late.", "4.0, 4.3", "TestRetriesComeSoonAfterARepair"},
			{"At-most-once dead-lettering, the default, silently drops messages whose target is missing or full.", "4.0, 4.3", "TestAtLeastOnceKeepsMessagesWithoutATargetAndTheAlternateExchangeTakesThem"},
			{"A null or a float in an outcome's annotation, or a sender's null, crashes each later consumer of the message.", "4.0, 4.3", "TestModifiedAnnotations TestPoisonedMessages TestNullAnnotationOfASenderEndsItsConsumers"},
			{"A settled message in several frames that can't be routed crashes the session.", "4.0, 4.3", "TestRandomSequencesComeToTheSame"},
			{"A disposition without the field `settled` ends the session with an internal error.", "4.0, 4.3", "TestTheBrokerInMemoryAnswersAsRabbitMQ"},
			{"A single active consumer can leave a ghost behind that becomes active: nobody receives anything.", "4.3", "TestWhatASingleActiveConsumerLeavesBehind TestASingleActiveConsumerThatGoesWhileItGivesWayStays"},
			{"A consumer that gives way and returns its last message has no successor.", "4.0", "TestNoConsumerIsActiveOnceALastMessageWasGivenBack"},
			{"After a consumer timeout, the broker sends nothing more until the stale delivery is settled; that gets no error.", "4.3", "TestConsumerTimeoutEndsTheHandlersContextAndBlocksTheLateSettlement"},
			{"Late frames of an ended session hit the next one on its channel.", "4.3", "TestLateFramesOfASessionHitTheNextOne"},
			{"An attach to a missing queue ends the session and all of its links.", "4.0", "TestAttachingToWhatIsMissingHarmsNobodyElse"},
			{"Returned messages count toward the delivery limit though nothing failed, so restarts can dead-letter them.", "4.0", "TestReturnedDeliveriesCount TestGracefulRestartsCostNoMessageItsDeliveries"},
			{"A direct reply that finds no credit is dropped, and its sender gets `accepted`.", "4.3", "TestDirectRepliesAreDroppedWithoutCredit"},
			{"Unknown stream filters are echoed and ignored: the consumer gets everything.", "4.0", "TestBrokersEchoFiltersThatTheyIgnore"},
			{"A node that is up refuses to attach to its streams, for seconds or minutes.", "4.0, 4.3", "TestAStreamWithoutAReplicaIsTriedAgain TestAStreamGoesOnAfterANodeIsKilled"},
			{"A dead letter that waits for its time is hidden in the dead-letter queue.", "4.4", "TestDeadLettersThatWaitAreReported"},
			{"If the broker's clock is set back, waiting messages are late by as much.", "4.3", "TestNativeSurvivesAStepOfTheBrokersClock"},
			{"Headers of AMQP 0-9-1 with tables or arrays don't arrive over AMQP 1.0.", "4.0, 4.3", "TestHeadersOfAMQP091ThatACopyCanNotKeep"},
			{"An import of definitions drops quorum queues that are auto-delete or transient, and reports success.", "4.0, 4.3", "TestAFileIsWhatTheBrokerReads"},
			{"A management request without its permission ends the session with all other requests.", "4.0, 4.3", "TestManagementRefusalDoesNotFailOtherRequests"},
		},
	},
	{
		title: "Other clients",
		intro: "The official client, rabbitmq-amqp-go-client, was 1.0.0, and go-amqp 1.7.0. The tests show that hopback isn't affected.",
		where: "seen in",
		faults: []fault{
			{"A consumer whose attach failed is attached after a reconnect, and swallows messages.", "official client", "TestRefusedConsumerIsNoGhostAfterAReconnect"},
			{"The socket of a failed open stays, and starts a second recovery; receivers survive `Close`.", "official client", "TestFailedOpensLeaveNothingBehind"},
			{"Recovery declares queues again without their arguments.", "official client", "TestQueueThatIsDeletedAndDeclaredAgainKeepsItsArguments"},
			{"`Send` returns nil for a message that was released.", "go-amqp", "TestPublishToNowhereIsErrUnroutable TestUnroutableForwardKeepsTheOriginal"},
			{"An attach to a missing queue ends the session that all links share.", "official client", "TestOfficialAttachToNothingEndsTheSessionOn40"},
			{"Unbinding with arguments does nothing.", "official client", "TestBindingWithArgumentsIsDeleted"},
			{"Closing the session before the receiver counts a failure for everything prefetched.", "go-amqp", "TestDrainGivesBackWhatNoHandlerHasBegun TestDrainKeepsTheOrderThatLeavesDeliveryCountsAlone"},
			{"An annotation or error text that can't be encoded, or is too large, closes the connection.", "go-amqp", "TestHostileOutcomesLeaveTheConnectionAlone TestConsumerCutsErrorTextsToWhatASettlementCanCarry"},
			{"A message without a body, or with a bad annotation key, ends the link or session.", "go-amqp", "TestHostileMessagesAreRefusedBeforeTheyAreSent TestValidateRefusesWhatWouldEndTheLink"},
			{"After a cancel during a large message, the next message ends the link.", "go-amqp", "TestCancelledPublishesHarmNobodyElse"},
			{"A ctx's deadline becomes a write deadline, and closes the connection.", "go-amqp", "TestCancelledPublishesHarmNobodyElse TestWhatIsNotAnsweredIsAbandoned"},
			{"The 65th session closes the connection, and the 257th link ends the session.", "go-amqp", "TestSessionTooManyIsErrSessionLimit TestForwardsToMoreAddressesThanASessionHasLinks"},
			{"Delivery-id 2³²-1 hangs the session.", "go-amqp", "TestSessionsAreReplacedLongBeforeTheirDeliveryIDsEnd TestDeliveryIDsOfASessionBeginAtZero TestConsumerReplacesItsSessionWithNothingUnsettled TestSenderReplacesItsSessionInOrder"},
			{"Concurrent callers get each other's management replies, and so do all after one timeout.", "official client", "TestConcurrentManagementRequestsGetTheirOwnReplies TestTimedOutManagementRequestDoesNotHarmTheNext"},
			{"The management's session ends after a malformed name, and stays unusable.", "official client", "TestManagementComesBackAfterItsSessionEnded TestManagementRefusalDoesNotFailOtherRequests TestManagementRefusesRequestsThatWouldEndTheSession"},
			{"ctx is ignored without credit, or with the session's window full.", "go-amqp", "TestAlarmStopsPublishingAndNothingElse TestSenderCloseCutsOffWhenItsContextEnds"},
			{"A status channel that isn't read blocks recovery; `Close` never ends; `Receive` spins.", "official client", "TestOutageIsWaitedForWithoutSpinning TestObserverThatHangsHoldsNothingUp TestCloseEndsInEveryState"},
			{"A consumer timeout starves a consumer silently, and the late accept returns nil.", "go-amqp", "TestConsumerTimeoutEndsTheHandlersContextAndBlocksTheLateSettlement"},
			{"Purging a missing queue, int arguments, and nil of every kind panic.", "official client", "TestNilAndMissingAreErrorsAndNoPanics TestQueueArgumentsReachTheBrokerWithTheirTypes"},
			{"A message with a char or a decimal ends the link, on 4.3 each time; deep nesting overflows the stack; a binary key in a footer panics.", "go-amqp", "TestMessagesThatCannotBeDecodedHarmNoOthers TestWhatIsNotDecodable TestHostileServers"},
			{"An array of ints or longs with one below -128 and none above 127 is cut to its lowest bytes.", "go-amqp", "TestValidateRefusesArraysThatWouldBeCut TestEveryTypeBetweenProtonAndHopback"},
			{"`Requeue` can't report a failure, so RabbitMQ 4.3 redelivers without end; `Discard` adds one to the delivery count.", "official client", "TestOfficialRequeueIsNotCountedOn43 TestOfficialDiscardWithAnnotationsIsCounted"},
			{"`Receive` panics if the annotation `x-stream-offset` isn't a long, and settling if a key has one byte.", "official client", "TestOfficialPanics"},
			{"Its publisher returns no error for released or rejected messages.", "official client", "TestOfficialPublishHasNoErrorForReleased"},
		},
	},
}
